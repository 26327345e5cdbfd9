"""The validator refuses what is wrong anywhere, in small results and in large ones of which only a part is done again in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nmkernels.timing import Validator, validator
from python_tests.for_each import for_each

ROWS, INNER, COLS = 150, 32, 120


@pytest.fixture(params=["fp32, whole", "fp32, sampled", "bf16, sampled"])
def operands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    if "sampled" in request.param:
        monkeypatch.setattr(validator, "WHOLE", 1000)
    dtype = torch.bfloat16 if "bf16" in request.param else torch.float32
    return torch.randn(ROWS, INNER).to(dtype), torch.randn(INNER, COLS).to(dtype)


def test_the_sample_has_every_part() -> None:
    for size in (81, 4096):
        which = validator._some(size, torch.device("cpu"))
        assert which is not None and len(which) == 80 and len(set(which.tolist())) == 80
        assert which.min() == 0 and which.max() == size - 1 and torch.diff(which).max() <= size // 48 + 2
    assert validator._some(80, torch.device("cpu")) is None


def test_what_is_right_passes(operands: tuple[Tensor, Tensor]) -> None:
    a, b = operands
    valid = Validator.of_gemm(a, b)
    assert valid(lambda out: torch.mm(a, b, out=out)) == ""
    assert valid(lambda out: out.copy_(a.double() @ b.double())) == ""
    # another order of summation
    assert valid(lambda out: out.copy_((a[:, :16].float() @ b[:16].float()) + (a[:, 16:].float() @ b[16:].float()))) == ""


@pytest.mark.parametrize("what", ["unwritten", "far", "half"])
def test_what_is_wrong_in_one_place_is_refused(what: str, operands: tuple[Tensor, Tensor]) -> None:
    a, b = operands
    valid = Validator.of_gemm(a, b)
    for where in ((0, 0), (-1, -1), (-1, 0), (74, 61), (73, 60), (33, 44)):

        def run(out: Tensor, where: tuple[int, int] = where) -> None:
            kept = out[where].clone()
            torch.mm(a, b, out=out)
            out[where] = kept if what == "unwritten" else out[where] + (10 if what == "far" else 6 * valid.bound)

        assert "is above" in valid(run), where


def test_outside_the_sample_four_times_the_bound_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validator, "WHOLE", 1000)
    a, b = torch.randn(ROWS, INNER), torch.randn(INNER, COLS)
    valid = Validator.of_gemm(a, b)
    assert valid.rows is not None and valid.cols is not None
    row, col = (next(i for i in range(size) if i not in which) for size, which in ((ROWS, valid.rows), (COLS, valid.cols)))

    def away(times: float) -> str:
        def run(out: Tensor) -> None:
            torch.mm(a, b, out=out)
            out[row, col] += times * valid.bound

        return valid(run)

    assert away(3.5) == away(-3.5) == ""
    for times in (4.5, -4.5):
        assert "from torch's result is above" in away(times)


def test_nothing_written_is_refused_where_zeros_would_be_right() -> None:
    valid = Validator.of_gemm(torch.zeros(ROWS, INNER), torch.randn(INNER, COLS))
    assert "max error nan" in valid(lambda out: None)
    assert valid(lambda out: out.zero_()) == ""


def test_what_differs_from_run_to_run_is_refused(operands: tuple[Tensor, Tensor]) -> None:
    a, b, calls = *(t.float() for t in operands), []

    def run(out: Tensor) -> None:
        torch.mm(a, b, out=out)
        calls.append(0)
        out[-1, -1] *= 1 + 2e-7 * len(calls)

    assert Validator.of_gemm(a, b)(run) == "two runs differ"


def test_integers_are_right_or_wrong() -> None:
    exact = torch.arange(12.0, dtype=torch.float64).reshape(3, 4)
    valid = Validator(exact, exact.to(torch.int8))
    assert valid(lambda out: out.copy_(exact)) == ""
    assert valid(lambda out: out[:2].copy_(exact[:2])) == "max error 12 against float64 is above 0"
    whole = torch.arange(200 * 3.0, dtype=torch.float64).reshape(200, 3)
    rows = validator._some(200, whole.device)
    some = Validator(whole[rows], whole.to(torch.int32), rows)
    assert some(lambda out: out.copy_(whole)) == ""
    assert "a difference of 1 from torch's result is above 0" in some(lambda out: out.copy_(whole)[17].add_(1))
    minus = Validator(torch.full((1, 4), -1.0, dtype=torch.float64), torch.full((1, 4), -1, dtype=torch.int8))
    assert minus(lambda out: None) == "two runs differ", "what lay in memory may be right once"


@for_each("rows, inner, cols", [(0, 4, 4), (4, 4, 0), (4, 0, 4), (1, 1, 1)])
def test_small_and_empty(rows: int, inner: int, cols: int) -> None:
    a, b = torch.randn(rows, inner), torch.randn(inner, cols)
    assert Validator.of_gemm(a, b)(lambda out: torch.mm(a, b, out=out)) == ""
