"""The device layouts word by word, as the PTX manual numbers lanes and bits, in plain Python."""

import itertools

import torch

from nmkernels.reference import to_layout
from python_tests.for_each import for_each

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


@for_each("layout, warps", [("mma.sp", 1), ("wgmma.sp", 4)])
def test_words_lane_by_lane(layout, warps):
    indices, nibbles = indices_of(128, 128)
    meta, height = to_layout(indices, 128, layout), 16 * warps
    assert meta.shape == (128 // height, 2, 32 * warps) and meta.dtype == torch.int32 and meta.is_contiguous()
    for i, j, warp, lane in itertools.product(range(128 // height), range(2), range(warps), range(32)):
        expected = signed(word(nibbles, height * i + 16 * warp, 64 * j, lane))
        assert meta[i, j, 32 * warp + lane] == expected, (i, j, warp, lane)


def test_words_of_8_bits_lane_by_lane():
    """A word of each lane for either of two instructions: eight groups of row T/4 + 8(T%2) for 32 columns from 32(T/2%2) on."""
    indices, nibbles = indices_of(128, 256)
    meta = to_layout(indices, 256, "wgmma.sp.8bit")
    assert meta.shape == (2, 2, 256) and meta.dtype == torch.int32 and meta.is_contiguous()
    for i, j, warp, lane, step in itertools.product(range(2), range(2), range(4), range(32), range(2)):
        row, col = 64 * i + 16 * warp + lane // 4 + 8 * (lane % 2), 128 * j + 64 * step + 32 * (lane // 2 % 2)
        expected = signed(sum(int(nibbles[row, col // 4 + k]) << (4 * k) for k in range(8)))
        assert meta[i, j, 128 * step + 32 * warp + lane] == expected, (i, j, warp, lane, step)
