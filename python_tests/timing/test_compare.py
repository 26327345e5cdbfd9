"""What ``measure`` does with its candidates: which are timed, which are named with a reason, and which one is taken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nmkernels.pattern import ShapeError
from nmkernels.timing import TABLE, Candidate, Timer, Validator
from nmkernels.timing.compare import LEAST_GAIN, Measurement, measure
from python_tests.for_each import for_each

EXACT = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)


def raises(error: Exception) -> Callable[..., str]:
    def run(*_: object) -> str:
        raise error

    return run


def candidate(name: str, run: Callable[[Tensor], object] = lambda out: out.copy_(EXACT), declines: Callable[[], str] = str) -> Candidate:
    return Candidate(name, run, lambda: [lambda: name], declines)


@pytest.mark.usefixtures("cache")
def test_only_correct_candidates_are_timed() -> None:
    timed: list[str] = []

    def seconds(task: Callable[[], object]) -> float:
        timed.append(str(task()))
        return {"torch": 4e-6, "fast": 1e-6}[timed[-1]]

    found = measure(
        "a problem",
        [
            candidate("torch"),
            candidate("fast"),
            candidate("wrong", lambda out: out.zero_()),
            candidate("cannot", raises(AssertionError("never run")), lambda: "no tensor cores"),
            candidate("ours", raises(ShapeError("too few rows\nand more"))),
            candidate("theirs", raises(RuntimeError("out of resources\nand more"))),
            candidate("unready", declines=raises(ValueError("no compiler"))),
        ],
        Validator(EXACT, EXACT.float()),
        Timer(torch.device("cpu"), seconds),
    )
    assert timed == ["torch", "fast"] * 2 and found.seconds == {"torch": 4e-6, "fast": 1e-6}
    assert found.declined == {"cannot": "no tensor cores"}
    assert found.refused.pop("wrong").startswith("max error 5 against float64")
    assert found.refused == {"ours": "too few rows", "theirs": "RuntimeError: out of resources", "unready": "ValueError: no compiler"}
    assert (found.best, found.gain) == ("fast", 4.0)
    assert str(found) == "a problem: fast, 1.0 us, default 4.0 us, 3 refused"
    found.store("x")
    assert TABLE.get("a problem") == {"choice": "x", "us": {"torch": 4.0, "fast": 1.0}, "refused": found.refused, "by": "nm.tune"}
    found.store(None)
    assert TABLE.get("a problem") is None


def test_one_that_fails_while_it_is_timed_is_refused() -> None:
    late = Candidate("late", lambda out: out.copy_(EXACT), lambda: [lambda: raises(RuntimeError("late"))()])
    found = measure("a problem", [candidate("torch"), late], Validator(EXACT, EXACT.float()), Timer(torch.device("cpu")), budget=0.0)
    assert list(found.seconds) == ["torch"] and found.refused == {"late": "RuntimeError: late"}


@for_each("seconds, best", [((1.0, 1.0 / LEAST_GAIN), "new"), ((1.0, 0.99), "torch"), ((1.0, 2.0), "torch"), ((1.0, 0.5), "new")])
def test_the_baseline_stays_unless_another_gains_more_than_noise(seconds: tuple[float, float], best: str) -> None:
    found = Measurement("a problem", "torch", half := dict(zip(("torch", "new"), seconds, strict=True)), halves=[half])
    assert found.best == best and found.gain == seconds[0] / found.seconds[best]


def test_a_wrong_baseline_is_replaced() -> None:
    found = Measurement("a problem", "torch", {"new": 2e-6}, {"torch": "wrong"}, note="not stored")
    assert (found.best, found.gain) == ("new", None) and str(found) == "a problem: new, 2.0 us, 1 refused (not stored)"
    found = Measurement("a problem", "torch")
    assert (found.best, found.gain) == ("torch", None) and str(found) == "a problem: no candidate is correct, 0 refused"


def test_what_cannot_be_stored_holds_for_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TABLE, "store", lambda lines: f"a file of {len(lines)}")
    found = Measurement("a problem", "torch")
    found.store(None)
    assert (found.path, found.note) == ("a file of 1", "")
    monkeypatch.setattr(TABLE, "store", raises(OSError("disk full")))
    found = Measurement("a problem", "torch")
    found.store(None)
    assert found.path is None and found.note == "could not be stored, valid in this process only: disk full"
