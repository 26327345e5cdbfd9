"""Measuring: only what came out right is timed, nothing of the caller's is touched. Clocks are made up."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
import torch

from nmkernels.autograd.choice import Call, Product, measure
from python_tests.autograd.choice.products import CPU, FPROP, clock, needs_core


@needs_core
def test_the_fastest_is_best() -> None:
    found = measure(FPROP, timer=clock(cpu_rows=0.25))
    assert (found.best, found.baseline, found.gain) == ("cpu rows", "dense", 4.0)
    assert found.seconds == {"dense": 1.0, "cpu rows": 0.25} and not found.refused
    assert "triton rows" in found.declined and "cuda rows" in found.declined
    assert measure(FPROP, timer=clock(cpu_rows=4.0)).best == "dense"
    assert measure(FPROP, timer=clock(cpu_rows=0.99)).best == "dense"  # noise
    assert measure(FPROP, timer=clock(cpu_rows=0.97)).best == "cpu rows"


@pytest.mark.parametrize("how", ["right", "wrong", "unwritten", "unsteady", "raises", "declines"])
def test_only_what_is_right_is_timed(how: str, mine: list[str]) -> None:
    mine[0] = how
    found = measure(FPROP, timer=clock(mine_rows=0.01))
    assert found.best == ("mine rows" if how == "right" else "dense")
    said = {
        "wrong": "against float64",
        "unwritten": "max error nan",
        "unsteady": "two runs differ",
        "raises": "RuntimeError: no shared memory",
    }
    if how == "declines":
        assert found.declined["mine rows"] == "it is mine"
    elif how != "right":
        assert found.refused["mine rows"].startswith(said[how]) or said[how] in found.refused["mine rows"]
        assert "more" not in found.refused["mine rows"]


def test_without_a_dense_layout_the_dispatcher_is_the_baseline(mine: list[str]) -> None:
    packed = FPROP._replace(forms=("rows",))
    found = measure(packed, timer=clock(mine_rows=0.5, expand=0.75))
    assert (found.baseline, found.best, found.gain) == ("auto", "mine rows", 2.0)
    mine[0] = "declines"
    assert measure(packed, timer=clock(expand=0.75)).best == "expand"
    assert measure(packed, timer=clock()).best == "auto"


@needs_core
def test_what_auto_takes_is_not_timed_twice() -> None:
    assert measure(FPROP._replace(forms=("rows",)), timer=clock()).declined["cpu rows"] == "it is what auto takes"


def test_forms_that_cannot_be_made_are_told() -> None:
    odd = Product("fprop", 20, 20, 32, 2, 4, torch.bfloat16, CPU, ("dense", "rows:mma.sp"))
    assert "16" in measure(odd, timer=clock()).declined["cuda rows:mma.sp"]


def test_nothing_of_the_caller_is_touched() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = measure(FPROP._replace(role="wgrad", rule="exact"), timer=clock())
    assert found.seconds["dense"] == 1.0 and not found.refused
    assert torch.equal(before, torch.get_rng_state()) and torch.is_grad_enabled()


@pytest.mark.parametrize("role", ["fprop", "dgrad", "wgrad"])
def test_a_real_clock_times_what_there_is(role: str) -> None:
    p = FPROP._replace(role=role, rule="exact" if role == "wgrad" else "")
    found = measure(p, budget=0.001)
    assert set(found.seconds) == {"dense", "cpu rows"} and all(t > 0 for t in found.seconds.values()) and not found.refused


def test_measurements_are_plain_data() -> None:
    assert dataclasses.asdict(measure(FPROP, timer=clock()))["baseline"] == "dense"


def test_what_a_backend_keeps_of_a_changing_weight_is_made_anew(mine: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("nmkernels.autograd.choice.measure")
    monkeypatch.setattr(module, "KEEPS", ("mine",))
    seen: list[int] = []
    before = module.candidates.call

    def call(name: str, product: Product, other: torch.Tensor, operand: Any, **more: Any) -> torch.Tensor:
        if name == "mine rows" and "out" not in more:
            seen.append(operand["rows"][0]._version)
        return before(name, product, other, operand, **more)

    monkeypatch.setattr(module.candidates, "call", call)

    def thrice(call: Call) -> float:
        return float(sum(call() is None for _ in range(3)))

    measure(FPROP, timer=thrice)
    measure(FPROP._replace(changing=True), timer=thrice)
    with torch.inference_mode():
        measure(FPROP._replace(changing=True), timer=thrice)
    assert seen == [0, 0, 0, 1, 2, 3, 1, 2, 3]


def test_a_backend_may_prepare_before_it_is_timed(mine: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[str] = []
    module = importlib.import_module("nmkernels.autograd.choice.measure")
    monkeypatch.setitem(module.PREPARE, "mine", lambda op, args: prepared.append(f"{op} {args[3]}:{args[4]}"))
    assert measure(FPROP, timer=clock(mine_rows=0.5)).best == "mine rows" and prepared == ["nm_linear 2:4"]
    measure(FPROP, timer=clock(), compiling=False)
    mine[0] = "declines"
    measure(FPROP, timer=clock())
    assert len(prepared) == 1
    mine[0] = "right"
    monkeypatch.setitem(module.PREPARE, "mine", lambda op, args: [][0])
    assert "IndexError" in measure(FPROP, timer=clock(mine_rows=0.5)).refused["mine rows"]
