"""The judge refuses what is wrong anywhere, in small results and in large ones of which only a part is done again in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nmkernels.autograd.choice import judge
from nmkernels.autograd.choice.judge import Judge

ROWS, INNER, COLS = 150, 32, 120


@pytest.fixture(params=[False, True], ids=["whole", "sampled"])
def sampled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        monkeypatch.setattr(judge, "WHOLE", 1000)
    return bool(request.param)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def operands(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, INNER).to(request.param), torch.randn(INNER, COLS).to(request.param)


def test_how_much_is_done_again(sampled: bool, operands: tuple[Tensor, Tensor]) -> None:
    assert Judge(*operands).exact.shape == ((80, 80) if sampled else (ROWS, COLS))
    a, b = operands
    assert Judge(a[:80], b).exact.shape == ((80, 80) if sampled else (80, COLS))


def test_the_sample_has_every_part() -> None:
    for size in (81, 100, 4096):
        which = judge._some(size, torch.device("cpu"))
        assert which is not None and len(which) == 80 and len(set(which.tolist())) == 80
        assert which.min() == 0 and which.max() == size - 1 and torch.diff(which).max() <= size // 48 + 2
    assert judge._some(80, torch.device("cpu")) is None


def test_what_is_right_passes(sampled: bool, operands: tuple[Tensor, Tensor]) -> None:
    a, b = operands
    judged = Judge(a, b)
    assert judged(lambda out: torch.mm(a, b, out=out)) == ""
    assert judged(lambda out: out.copy_(a.double() @ b.double())) == ""
    # another order of summation
    assert judged(lambda out: out.copy_((a[:, :16].float() @ b[:16].float()) + (a[:, 16:].float() @ b[16:].float()))) == ""


@pytest.mark.parametrize("where", [(0, 0), (-1, -1), (-1, 0), (74, 61), (73, 60), (33, 44)])
@pytest.mark.parametrize("what", ["unwritten", "far", "half"])
def test_what_is_wrong_in_one_place_is_refused(what: str, where: tuple[int, int], sampled: bool, operands: tuple[Tensor, Tensor]) -> None:
    a, b = operands
    judged = Judge(a, b)

    def run(out: Tensor) -> None:
        torch.mm(a, b, out=out)
        out[where] = torch.nan if what == "unwritten" else out[where] + (10 if what == "far" else 6 * judged.bound)

    assert "is above" in judged(run)


def test_nothing_written_is_refused_where_zeros_would_be_right(sampled: bool) -> None:
    judged = Judge(torch.zeros(ROWS, INNER), torch.randn(INNER, COLS))
    assert "max error nan" in judged(lambda out: None)
    assert judged(lambda out: out.zero_()) == ""


def test_a_sparse_weight_that_loses_values_is_refused(sampled: bool, operands: tuple[Tensor, Tensor]) -> None:
    a, b = operands
    broken = b.clone()
    broken[3, 70:] = 0
    assert "is above" in Judge(a, b)(lambda out: torch.mm(a, broken, out=out))


def test_what_differs_from_run_to_run_is_refused(sampled: bool) -> None:
    a, b, calls = torch.randn(ROWS, INNER), torch.randn(INNER, COLS), []

    def run(out: Tensor) -> None:
        torch.mm(a, b, out=out)
        calls.append(0)
        out[-1, -1] *= 1 + 2e-7 * len(calls)

    assert Judge(a, b)(run) == "two runs differ"


@pytest.mark.parametrize("shape", [(0, 4, 4), (4, 4, 0), (4, 0, 4), (1, 1, 1)])
def test_small_and_empty(shape: tuple[int, int, int]) -> None:
    a, b = torch.randn(shape[0], shape[1]), torch.randn(shape[1], shape[2])
    assert Judge(a, b)(lambda out: torch.mm(a, b, out=out)) == ""
