"""HardMask: the transform of STE and SR-STE."""

import pytest
import torch

from nmkernels import Pattern, PatternError, ShapeError
from nmkernels.autograd import HardMask
from nmkernels.testing import equal_bits
from python_tests import plain


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("pattern", ["2:4", "1:4", "3:8", "1:16"])
def test_keeps_the_largest_of_each_group(pattern, dtype):
    p, w = Pattern(pattern), torch.randn(6, 32).to(dtype)
    assert equal_bits(HardMask(p)(w), plain.masked(w, p.n, p.m))


def test_out_is_written_and_returned():
    w, out = torch.randn(4, 8), torch.full((4, 8), float("nan"))
    assert HardMask(Pattern("2:4"))(w, out=out) is out
    assert equal_bits(out, plain.masked(w, 2, 4))


def test_pruned_nan_and_inf_leave_plus_zero():
    w = torch.tensor([[float("nan"), float("inf"), -1.0, -2.0], [float("-inf"), -3.0, 3.0, float("inf")]])
    kept = HardMask(Pattern("1:4"))(w)
    assert equal_bits(kept, torch.tensor([[float("nan"), 0.0, 0.0, 0.0], [float("-inf"), 0.0, 0.0, 0.0]]))


def test_transposed_view_is_grouped_along_its_own_last_dimension():
    w = torch.randn(8, 6).t()
    assert equal_bits(HardMask(Pattern("2:4"))(w), plain.masked(w.contiguous(), 2, 4))


def test_equal_patterns_make_equal_transforms():
    assert HardMask(Pattern("2:4")) == HardMask(Pattern("2:4")) != HardMask(Pattern("1:4"))


def test_bad_input_raises():
    with pytest.raises(ShapeError, match="multiple of M=4"):
        HardMask(Pattern("2:4"))(torch.randn(2, 6))
    with pytest.raises(PatternError):
        HardMask(Pattern("4:2"))
    for wrong in (torch.ones(2, 4, dtype=torch.int32), torch.ones(2, 4, dtype=torch.complex64)):
        with pytest.raises(TypeError, match=str(wrong.dtype)):
            HardMask(Pattern("2:4"))(wrong)
