"""Canonical indices in the orders of tensor cores: the words of every tile, odd addresses, and out=."""

from __future__ import annotations

import pytest
import torch

from nmkernels import reference
from nmkernels.backends.cuda.compress import metadata
from nmkernels.testing import assert_equal_bits, fill_poison
from python_tests.backends.gemm_calls import unaligned


@pytest.mark.parametrize("layout", ["mma.sp", "wgmma.sp"])
def test_every_word(device, layout):
    """Any bytes: a permutation looks at none of them."""
    for rows, cols in [(64, 64), (192, 320), (128, 64 * 9), (0, 64), (64, 0)]:
        indices = torch.randint(256, (rows, cols // 8), dtype=torch.uint8).to(device)
        expected = reference.to_layout(indices, cols, layout)
        assert_equal_bits(metadata(indices, cols, layout), expected)
        assert_equal_bits(metadata(unaligned(indices), cols, layout), expected)
        assert_equal_bits(metadata(torch.stack([indices, indices], -1)[..., 0], cols, layout), expected)
        out = fill_poison(torch.empty_like(expected))
        assert metadata(indices, cols, layout, out=out) is out
        assert_equal_bits(out, expected)


def test_rows_of_no_warpgroup(device):
    for rows in [16, 48, 80]:
        indices = torch.randint(256, (rows, 16), dtype=torch.uint8).to(device)
        assert_equal_bits(metadata(indices, 128, "mma.sp"), reference.to_layout(indices, 128, "mma.sp"))
