"""equal_bits and assert_no_worse notice what they are for, and nothing else."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from nmkernels import ops, testing
from python_tests.for_each import for_each

NAN = float("nan")


def t(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@for_each("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_equal_bits(dtype: torch.dtype) -> None:
    x = t(1.0, NAN, -0.0, float("inf"), dtype=dtype)
    assert testing.equal_bits(x, x.clone())
    for i, other in enumerate([1 + torch.finfo(dtype).eps, 0.0, 0.0, float("-inf")]):
        y = x.clone()
        y[i] = other
        assert not testing.equal_bits(x, y) and not testing.equal_bits(y, x)
    assert testing.equal_bits(x[1:2], -x[1:2])  # NaNs of any sign or payload are one
    assert testing.equal_bits(x.expand(3, 4).t(), torch.stack([x] * 3).t().contiguous())


def test_equal_bits_of_other_things() -> None:
    assert not testing.equal_bits(t(1.0), t(1.0).double()) and not testing.equal_bits(t(1.0), t(1.0).reshape(1, 1))
    assert testing.equal_bits(torch.tensor(True), torch.tensor(True)) and not testing.equal_bits(torch.tensor(True), torch.tensor(False))
    assert testing.equal_bits([t(1.0), {"a": 2}], [t(1.0), {"a": 2}]) and not testing.equal_bits([t(1.0)], (t(1.0),))
    assert not testing.equal_bits(None, t(1.0)) and not testing.equal_bits(1, 2) and not testing.equal_bits(1, 1.0)
    assert testing.equal_bits(torch.zeros(0, 4), torch.zeros(0, 4))
    c = ops.compress(t(1, 2, 3, 4), "2:4")
    assert testing.equal_bits(c, ops.compress(t(0, 0, 3, 4), "2:4")) and not testing.equal_bits(c, ops.compress(t(0, 3, 0, 4), "2:4"))


def test_message_names_the_first_difference() -> None:
    a, b = torch.zeros(2, 3), torch.zeros(2, 3)
    b[1, 0], b[1, 2] = -0.0, 5.0
    with pytest.raises(AssertionError, match=r"why: 2 of 6 elements differ, first at \(1, 0\): 0\.0 is not -0\.0"):
        testing.assert_equal_bits(a, b, "why")
    with pytest.raises(AssertionError, match=r"leaf 1: 1 of 1"):
        testing.assert_equal_bits([a, t(1.0)], [a, t(2.0)])


def test_no_worse_is_the_written_bound() -> None:
    exact, eps = torch.tensor([1.0, -8.0]).double(), torch.finfo(torch.float32).eps
    theirs = exact.float() + 1e-4
    bound = 2 * (theirs.double() - exact).abs().max().item() + 4 * eps * 8
    for factor, fails in [(0.99, nullcontext()), (1.01, pytest.raises(AssertionError, match="nt: max error .* is above"))]:
        with fails:
            testing.assert_no_worse((exact + torch.tensor([0, factor * bound]).double()).float(), theirs, exact, "nt")


def test_no_worse_does_not_pass_by_nan_or_shape() -> None:
    one = t(1.0)
    for ours, exact in [(t(NAN), one.double()), (one, one), (one.reshape(1, 1), one.double()), (one.half(), one.double())]:
        with pytest.raises(AssertionError):
            testing.assert_no_worse(ours, one, exact)
    with pytest.raises(AssertionError):
        testing.assert_no_worse(one, t(NAN), one.double())
    testing.assert_no_worse(torch.zeros(0), torch.zeros(0), torch.zeros(0).double())
