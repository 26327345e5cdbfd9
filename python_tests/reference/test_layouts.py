"""The device layouts word by word, as the PTX manual numbers lanes and bits, in plain Python."""

import itertools

import pytest
import torch

from nmkernels.pattern import DtypeError, NMError, OptionError, Pattern, PatternError, ShapeError
from nmkernels.reference import LAYOUTS, compress, from_layout, to_layout, unpack_indices
from nmkernels.reference.layouts import check_layout
from python_tests.each import each

BF16 = torch.bfloat16
ORDERED = {0x4, 0x8, 0xC, 0x9, 0xD, 0xE}


def indices_of(rows, cols, seed=0):
    """Canonical indices of random 2:4 groups, by hand: every nibble is an ordered one."""
    draw = torch.randint(6, (rows, cols // 4), generator=torch.Generator().manual_seed(seed))
    nibbles = torch.tensor(sorted(ORDERED), dtype=torch.uint8)[draw]
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4, nibbles


def metadata_word(nibbles, row, col):
    """16 bits: the groups of the 16 dense columns from ``col`` on, little end first."""
    return sum(int(nibbles[row, col // 4 + k]) << (4 * k) for k in range(4))


def word(nibbles, top, left, lane):
    """What a lane hands to mma.sp for the 16 rows from ``top`` and the 64 columns from ``left``."""
    row, col = top + lane // 4, left + 16 * (lane % 4)
    return metadata_word(nibbles, row, col) | metadata_word(nibbles, row + 8, col) << 16


def signed(x):
    return x - (1 << 32) if x >> 31 else x


def test_mma_words_lane_by_lane():
    indices, nibbles = indices_of(32, 128)
    meta = to_layout(indices, 128, "mma.sp")
    assert meta.shape == (2, 2, 32) and meta.dtype == torch.int32 and meta.is_contiguous()
    for i, j, lane in itertools.product(range(2), range(2), range(32)):
        assert meta[i, j, lane] == signed(word(nibbles, 16 * i, 64 * j, lane)), (i, j, lane)


def test_wgmma_words_lane_by_lane():
    indices, nibbles = indices_of(128, 128, 1)
    meta = to_layout(indices, 128, "wgmma.sp")
    assert meta.shape == (2, 2, 128) and meta.dtype == torch.int32 and meta.is_contiguous()
    for i, j, warp, lane in itertools.product(range(2), range(2), range(4), range(32)):
        assert meta[i, j, 32 * warp + lane] == signed(word(nibbles, 64 * i + 16 * warp, 64 * j, lane)), (i, j, warp, lane)
    assert torch.equal(meta.view(2, 2, 4, 32).transpose(1, 2).reshape(8, 2, 32), to_layout(indices, 128, "mma.sp"))


def test_the_selector_picks_the_step_of_32_columns():
    """Lanes with lane % 4 in {0, 1} must hold all of one k32 step, selector 0; those in {2, 3} all of the next, selector 1."""
    w = torch.zeros(16, 64)
    w[:, 32:] = torch.tensor([0.0, 0.0, 1.0, 1.0]).repeat(8)  # 0xE behind column 32, 0x4 before
    w[:, :32] = torch.tensor([1.0, 1.0, 0.0, 0.0]).repeat(8)
    meta = to_layout(compress(w, 2, 4)[1], 64, "mma.sp")[0, 0].view(8, 4)
    assert (meta[:, :2] == 0x44444444).all() and (meta[:, 2:] == signed(0xEEEEEEEE)).all()


@each("layout", LAYOUTS)
@each("shape", [(64, 64), (192, 64), (64, 256), (0, 64), (64, 0)])
def test_there_and_back(layout, shape):
    indices = torch.randint(256, (shape[0], shape[1] // 8), dtype=torch.uint8)
    meta = to_layout(indices, shape[1], layout)
    assert torch.equal(from_layout(meta, layout), indices) and from_layout(meta, layout).is_contiguous()
    assert torch.equal(to_layout(from_layout(meta, layout), shape[1], layout), meta)
    assert meta.nbytes == indices.nbytes


def test_strided_in_both_directions():
    indices = torch.randint(256, (64, 32), dtype=torch.uint8)[:, ::2]
    meta = to_layout(indices, 128, "wgmma.sp")
    assert torch.equal(meta, to_layout(indices.contiguous(), 128, "wgmma.sp"))
    assert torch.equal(from_layout(torch.stack((meta, meta), -1)[..., 0], "wgmma.sp"), indices)


def test_metadata_is_ordered_however_few_are_kept():
    """The tensor cores need the six ordered nibbles; short groups are padded so that they stay in order."""
    masks = [m for m in itertools.product((False, True), repeat=4) if sum(m) <= 2]
    mask = torch.tensor(masks)[torch.randint(len(masks), (64, 16), generator=torch.Generator().manual_seed(2))]
    indices = compress(torch.randn(64, 64), 2, 4, mask.flatten(1))[1]
    meta = to_layout(indices, 64, "wgmma.sp")
    seen = {(int(x) >> s) & 15 for x in meta.flatten() for s in range(0, 32, 4)}
    assert seen == ORDERED
    first, second = unpack_indices(from_layout(meta, "wgmma.sp"), 2, 32).view(64, 16, 2).unbind(-1)
    assert (first < second).all()


def test_errors():
    good = torch.zeros(64, 8, dtype=torch.uint8)
    meta = to_layout(good, 64, "mma.sp")
    wrong = [
        (lambda: to_layout(good, 64, "wmma"), OptionError, "to_layout.*'wmma'.*'mma.sp', 'wgmma.sp'"),
        (lambda: to_layout(good.int(), 64, "mma.sp"), DtypeError, "int32.*uint8"),
        (lambda: to_layout(good, 128, "mma.sp"), ShapeError, r"\(64, 8\).*128"),
        (lambda: to_layout(good[:8], 64, "mma.sp"), ShapeError, r"16 rows and 64 columns.*\(8, 64\)"),
        (lambda: to_layout(good[:48], 64, "wgmma.sp"), ShapeError, r"64 rows and 64 columns.*\(48, 64\)"),
        (lambda: to_layout(good[:, :4], 32, "mma.sp"), ShapeError, r"\(64, 32\)"),
        (lambda: from_layout(meta, "sm80"), OptionError, "from_layout.*'sm80'"),
        (lambda: from_layout(meta.long(), "mma.sp"), DtypeError, "int64.*int32"),
        (lambda: from_layout(meta, "wgmma.sp"), ShapeError, r"\(4, 1, 32\).*128"),
        (lambda: check_layout("x", "mma.sp", 64, 64, Pattern("1:4"), BF16), PatternError, "x: .*1:4"),
        (lambda: check_layout("x", "mma.sp", 64, 64, Pattern("2:4"), torch.float32), DtypeError, "x: .*16-bit.*float32"),
    ]
    for call, kind, text in wrong:
        with pytest.raises(kind, match=text):
            call()
        assert issubclass(kind, NMError)
    check_layout("x", "canonical", 3, 5, Pattern("3:5"), torch.float64)
