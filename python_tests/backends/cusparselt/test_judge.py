"""The check of an algorithm is as strict as it says, whatever surrounds the first call."""

from __future__ import annotations

import pytest
import torch

from nmkernels.backends.cusparselt import Algorithm, Problem, algorithms, context
from nmkernels.backends.cusparselt.algorithms import Trial
from nmkernels.tuning import Validator


def test_wrong_integers_are_noticed(fake) -> None:
    fake.set("unwritten:0")
    at = context.here(0)
    for out in (torch.int32, torch.int8):
        problem = Problem("nt", torch.int8, out, 32, 64, 16)
        assert algorithms.ready_for(problem, at, torch.empty(0), 0).algorithm == Algorithm(1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_what_surrounds_the_first_call_does_not_change_the_bound(fake, dtype) -> None:
    def judge() -> Validator:
        return Trial(Problem("nt", dtype, torch.float16, 32, 64, 16), context.here(0), torch.empty(0), 0).validator

    first = judge()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        second = judge()
    torch.set_default_dtype(torch.float64)
    try:
        third = judge()
    finally:
        torch.set_default_dtype(torch.float32)
    for other in (second, third):
        assert other.bound == first.bound and torch.equal(other.exact, first.exact)
