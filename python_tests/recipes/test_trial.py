"""The trial: the first steps alternate, whole steps decide, and what they decided is found again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.autograd import gemms
from nmkernels.capability import compiled_core
from nmkernels.recipes import trial
from nmkernels.tuning import TABLE

pytestmark = pytest.mark.skipif(not compiled_core().ok, reason=compiled_core().reason)

LENGTH = 1 + trial.WARM + 2 * trial.PAIRS
"""Steps until the verdict, the first one with them."""


@pytest.fixture(autouse=True)
def free(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every GEMM was measured to be faster packed."""
    monkeypatch.delenv("NMKERNELS_CHOICE", raising=False)
    monkeypatch.setattr(gemms, "_measure_now", lambda gemm: "dense" if gemm.role == "wgrad" else "cpu rows")


class Run:
    """Steps of training on a clock of their own; ``took(step, dense)`` are the seconds of one."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, took: Callable[[int, bool], float], recipe: str = "srste:2:4", **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64))
        self.handle = nm.sparsify_(self.model, nm.recipes.get(recipe, **options))
        self.optimizer = self.handle.attach(self.handle.recipe.optimizer(self.model.parameters(), lr=1e-2))
        self.took, self.now, self.count = took, 0.0, 0
        self.dense: list[bool] = []
        monkeypatch.setattr(trial, "now", lambda device: self.now)

    def steps(self, count: int) -> Run:
        for _ in range(count):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(self.count))
            self.dense.append(self.model[0].effective.dense_layout)
            self.model(x).square().sum().backward()
            self.now += self.took(self.count, self.dense[-1])
            self.count += 1
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    @property
    def packed(self) -> bool:
        return not self.model[0].effective.dense_layout

    @property
    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def faster(by: float) -> Callable[[int, bool], float]:
    """Packed steps are so many times as fast, and the machine is slower now and then."""
    return lambda step, dense: (1.0 if dense else 1 / by) * (1 + 0.3 * (step // 5 % 2))


@pytest.mark.parametrize(("by", "packed"), [(1.3, True), (1.05, True), (1.01, False), (0.8, False)])
def test_whole_steps_decide(by: float, packed: bool, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    run = Run(monkeypatch, faster(by)).steps(LENGTH + 3)
    assert run.dense == [False, *[True, False] * (trial.WARM // 2 + trial.PAIRS), *[not packed] * 3]
    assert run.packed == packed and run.handle.run.trial.done
    (line,) = [line for key, line in json.loads((cache / "tuning.json").read_text())["lines"].items() if key.startswith("step|")]
    assert (line["choice"], line["by"]) == ("packed" if packed else "dense", "training") and line["us"].keys() == {"packed", "dense"}
    # a later run follows it from its second step on, and another model does not
    later = Run(monkeypatch, faster(1.0)).steps(3)
    assert later.dense == [False, not packed, not packed] and later.handle.run.trial.done
    other = Run(monkeypatch, faster(1.0), "srste:1:4").steps(3)
    assert other.dense == [False, True, False]


def test_noise_is_no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of seven pairs in favour, by much."""
    assert not Run(monkeypatch, lambda step, dense: 1.0 if dense else 0.5 if step % 4 else 1.1).steps(LENGTH).packed


def test_single_slow_steps_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation between two steps, say."""
    assert Run(monkeypatch, lambda step, dense: 50.0 if step == 7 else 1.0 if dense else 0.9).steps(LENGTH).packed
    assert not Run(monkeypatch, lambda step, dense: 50.0 if step == 7 else 1.0 if dense else 1.1, "srste:1:4").steps(LENGTH).packed


@pytest.mark.parametrize("recipe", ["srste:2:4", "sste:2:4", "fst:2:4"])
def test_nothing_but_rounding_differs(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"total_steps": 60} if recipe.startswith("fst") else {}
    got = Run(monkeypatch, faster(1.3), recipe, **options).steps(LENGTH + 2)
    want = Run(monkeypatch, faster(1.3), recipe, packed=False, **options).steps(LENGTH + 2)
    for a, b in zip(got.weights, want.weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert want.handle.run.trial is None and not any(want.dense)


@pytest.mark.parametrize("setting", ["dense", "packed", "table"])
def test_the_environment_forbids_it(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NMKERNELS_CHOICE", setting)
    gemms.forget()
    run = Run(monkeypatch, faster(0.5)).steps(LENGTH)
    assert run.packed and run.handle.run.trial.done and not any(key.startswith("step|") for key in TABLE.lines())


def test_nothing_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemms, "_measure_now", lambda gemm: "dense")
    assert Run(monkeypatch, faster(0.5)).steps(1).handle.run.trial.done
    assert Run(monkeypatch, faster(0.5), "srste:2:4", packed=True).handle.run.trial is None


def test_deterministic_algorithms_keep_the_dense_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    want = Run(monkeypatch, faster(0.5), packed=False).steps(6).weights
    torch.use_deterministic_algorithms(True)
    try:
        run = Run(monkeypatch, faster(0.5)).steps(6)
        assert all(a.equal(b) for a, b in zip(run.weights, want, strict=True))
        assert not run.model[0].effective.asked and not run.handle.run.trial.done
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_watched_step_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, faster(1.3)).steps(3)
    with torch.profiler.profile():
        run.steps(2)
    assert run.dense[1:] == [True, False, True, True] and run.steps(2).dense[-2:] == [True, False]


def test_one_form_is_kept_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, faster(1.3)).steps(4)
    assert len(run.model[2].effective.kept) == 2
    run.steps(LENGTH - 3)
    (form,) = run.model[2].effective.kept
    assert isinstance(form, nm.ops.Packed)


def test_a_new_stage_is_tried_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, faster(0.5), "sdgf:1:8", total_steps=120).steps(LENGTH)
    assert not run.packed
    run.steps(60 - LENGTH)
    assert len({key for key in TABLE.lines() if key.startswith("step|")}) >= 2


def test_the_clock_of_a_gpu_is_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    class Event:
        def __init__(self, at: float) -> None:
            self.at = at

        def synchronize(self) -> None:
            waited.append(self.at)

        def elapsed_time(self, end: Event) -> float:
            return 1e3 * (end.at - self.at)

    assert trial.between(Event(1.0), Event(3.5)) == 2.5 and waited == [3.5]
    recorded: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: SimpleNamespace(record=recorded.append))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "its stream")
    trial.now(torch.device("cuda", 0))
    assert recorded == ["its stream"]
    assert 0 <= trial.between(trial.now(torch.device("cpu")), trial.now(torch.device("cpu"))) < 1
