"""The compressed form against a loop over groups in plain Python."""

import math

import pytest
import torch

from nmkernels.pattern import Pattern, ShapeError
from nmkernels.reference import compress, decompress, mask, pack_indices, prune, unpack_indices
from nmkernels.testing import equal_bits
from python_tests.each import each
from python_tests.reference.conftest import DTYPES, edge

PATTERNS = [(1, 1), (1, 2), (2, 2), (2, 3), (1, 4), (2, 4), (4, 4), (2, 8), (5, 12), (3, 16), (3, 17), (5, 32), (1, 256)]


def looped(w, n, m, keep):
    """Values and index bytes of one row, by the words of the format."""
    bits = 2 if m <= 4 else 4 if m <= 16 else 8
    values, code, count = [], 0, 0
    for start in range(0, len(w), m):
        kept = [i for i in range(m) if keep[start + i]]
        spare = [i for i in range(m) if i not in kept][: n - len(kept)]
        for i in sorted(kept + spare):
            values.append(w[start + i] if i in kept else 0.0)
            code, count = code | i << (count * bits), count + 1
    return values, list(code.to_bytes((count * bits + 7) // 8, "little"))


@each("n, m", PATTERNS)
@each("given", ["none", "full", "short", "empty"])
@each("dtype", DTYPES)
def test_equals_a_loop(n, m, given, dtype):
    w = edge(5, 3 * m, dtype, seed=m)
    keep = mask(w, n, m)
    if given == "short":
        keep &= torch.rand(w.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    elif given == "empty":
        keep[:] = False
    values, indices = compress(w, n, m, None if given == "none" else keep)
    rows = [looped(row, n, m, k) for row, k in zip(w.tolist(), keep.tolist(), strict=True)]
    assert equal_bits(values, torch.tensor([r[0] for r in rows], dtype=torch.float64).to(dtype))
    assert indices.dtype == torch.uint8 and indices.tolist() == [r[1] for r in rows]
    assert indices.shape[-1] == Pattern(n, m).index_bytes(3 * m)
    assert equal_bits(decompress(values, indices, n, m, 3 * m), torch.where(keep, w, torch.zeros_like(w)))


def test_two_of_four_is_one_nibble_a_group_and_rows_start_on_bytes():
    w = torch.tensor([[0.0, 5.0, 0.0, 6.0] * 3, [7.0, 0.0, 8.0, 0.0] * 3])
    values, indices = compress(w, 2, 4)
    assert values.tolist() == [[5.0, 6.0] * 3, [7.0, 8.0] * 3]
    assert indices.tolist() == [[0xDD, 0x0D], [0x88, 0x08]]


def test_short_groups_are_filled_at_the_lowest_unkept_positions_with_positive_zero():
    w = torch.tensor([-1.0, -2.0, -3.0, math.nan])
    values, indices = compress(w, 3, 4, torch.tensor([False, True, False, False]))
    assert values.tolist() == [0.0, -2.0, 0.0] and indices.tolist() == [0 | 1 << 2 | 2 << 4]
    assert not values[::2].signbit().any()


def test_kept_elements_keep_their_bits():
    bits = torch.tensor([0x7FC12345, -(1 << 31), -1, 1], dtype=torch.int32)  # a NaN with payload, -0.0, a negative NaN, a denormal
    values, _ = compress(bits.view(torch.float32), 4, 4)
    assert torch.equal(values.view(torch.int32), bits)


@each("cols", [1, 3, 4, 5, 6, 7])
def test_a_partial_last_group_drops_the_padding(cols):
    w = torch.randn(3, 8)
    w[:, cols:] = 0
    values, indices = compress(w, 2, 4)
    groups = Pattern("2:4").groups(cols)
    values, indices = values[:, : groups * 2], indices[:, : Pattern("2:4").index_bytes(cols)]
    if groups == 1:
        indices = indices & 0x0F
    assert torch.equal(decompress(values, indices, 2, 4, cols), prune(w, 2, 4)[:, :cols])


@each("dtype", DTYPES)
def test_strides_leading_dimensions_and_empty(dtype):
    base = edge(6, 24, dtype).view(2, 3, 24)
    w = base.transpose(0, 1)
    values, indices = compress(w, 2, 4)
    flat = compress(w.reshape(6, 24), 2, 4)
    assert equal_bits(values.view(6, 12), flat[0]) and torch.equal(indices.view(6, 3), flat[1])
    doubled = torch.stack((values, values), -1)[..., 0]
    assert equal_bits(decompress(doubled, indices, 2, 4, 24), prune(w, 2, 4))
    row = base[0, 0].expand(4, 24)
    assert equal_bits(decompress(*compress(row, 2, 4), 2, 4, 24), prune(row, 2, 4))
    for shape in ((0, 8), (3, 0), (0, 2, 4)):
        values, indices = compress(torch.randn(shape), 2, 4)
        assert values.shape == (*shape[:-1], shape[-1] // 2) and indices.shape == (*shape[:-1], (shape[-1] + 7) // 8)
        assert decompress(values, indices, 2, 4, shape[-1]).shape == shape


def test_damaged_indices_and_masks_that_are_too_full():
    with pytest.raises(ShapeError, match=r"compress: the mask keeps 4.*2:4 stores 2"):
        compress(torch.ones(2, 8), 2, 4, torch.ones(2, 8, dtype=torch.bool))
    with pytest.raises(ShapeError, match="index 3 does not exist in a group of 3"):
        decompress(torch.ones(1), torch.tensor([3], dtype=torch.uint8), 1, 3, 3)


# ---- the packing of small integers, against Python's own little-endian ones


@each("bits", [2, 4, 8])
@each("count", [0, 1, 2, 3, 4, 5, 7, 8, 9, 64])
def test_a_row_is_one_little_endian_integer(bits, count):
    idx = torch.randint(1 << bits, (6, count), generator=torch.Generator().manual_seed(count)).to(torch.uint8)
    size = (count * bits + 7) // 8
    packed = pack_indices(idx, bits)
    assert packed.shape == (6, size) and packed.dtype == torch.uint8
    for row, got in zip(idx.tolist(), packed.tolist(), strict=True):
        assert bytes(got) == sum(x << (i * bits) for i, x in enumerate(row)).to_bytes(size, "little")
    assert torch.equal(unpack_indices(packed, bits, count), idx)


def test_any_leading_dimensions_and_strides():
    idx = torch.randint(4, (3, 5, 10)).to(torch.uint8)
    packed = pack_indices(idx.transpose(0, 1), 2)
    assert torch.equal(packed, pack_indices(idx.transpose(0, 1).contiguous(), 2)) and packed.is_contiguous()
    wide = torch.stack((packed, packed), -1)[..., 0]
    assert not wide.is_contiguous() and torch.equal(unpack_indices(wide, 2, 10), idx.transpose(0, 1))
    assert pack_indices(torch.zeros(0, 3, dtype=torch.uint8), 4).shape == (0, 2)
    assert unpack_indices(torch.zeros(0, 2, dtype=torch.uint8), 4, 3).shape == (0, 3)
