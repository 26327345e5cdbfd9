"""masked: bits stay, zeros are +0, whatever memory looks like."""

from __future__ import annotations

import pytest
import torch

from nmkernels.autograd.transforms import masked
from nmkernels.testing import assert_equal_bits

SPECIAL = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-42, -3.5, 65504.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("way", ["plain", "transposed", "strided", "negated", "needs grad"])
def test_bits(dtype: torch.dtype, way: str) -> None:
    x = SPECIAL.to(dtype).repeat(6, 2)
    mask = torch.rand(6, 16) < 0.5
    if way == "transposed":
        x, mask = x.t(), mask.t()
    elif way == "strided":
        x, mask = x[:, ::3], mask[:, ::3]
    elif way == "negated":
        x = torch._neg_view(x)
    elif way == "needs grad":
        x = x.clone().requires_grad_()
    expected = torch.where(mask, x.detach().resolve_neg(), torch.zeros((), dtype=dtype)).contiguous()
    found = masked(x, mask).detach()
    assert_equal_bits(found, expected)
    assert not found.signbit()[~mask].any() and found.is_contiguous()


def test_out_is_written_and_says_so() -> None:
    x, mask, out = torch.randn(4, 8), torch.rand(4, 8) < 0.5, torch.full((4, 8), torch.nan)
    version = out._version
    assert masked(x, mask, out) is out and out._version > version
    assert_equal_bits(out, masked(x, mask))


def test_empty() -> None:
    assert masked(torch.ones(0, 4), torch.ones(0, 4, dtype=torch.bool)).shape == (0, 4)


def test_compiled_equals_eager() -> None:
    x, mask = torch.randn(4, 8), torch.rand(4, 8) < 0.5
    assert_equal_bits(torch.compile(masked, fullgraph=True)(x, mask), masked(x, mask))


def test_in_a_transform_of_torch_func() -> None:
    x, mask = torch.randn(3, 8), torch.rand(3, 8) < 0.5
    assert_equal_bits(torch.func.vmap(masked)(x, mask), masked(x, mask))
