"""Index packing against Python's own little-endian integers."""

import pytest
import torch

from nmkernels.pattern import DtypeError, PatternError, ShapeError
from nmkernels.reference import pack_indices, unpack_indices
from python_tests.each import each


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


def test_errors():
    idx = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(PatternError, match="3 bits"):
        pack_indices(idx, 3)
    with pytest.raises(DtypeError, match=r"unpack_indices.*int64"):
        unpack_indices(idx.long(), 2, 4)
    with pytest.raises(ShapeError, match="4 bytes cannot hold 17"):
        unpack_indices(idx, 2, 17)
