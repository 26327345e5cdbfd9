"""What is wrong is not timed, what was done is kept, and what was done before is left out."""

from __future__ import annotations

import os
import re
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from bench import cases, outcomes, runner, timing
from bench.registry import Provider, Ratio, Spec
from bench.timing import Timed, take_turns
from nmkernels import dispatch, reference
from python_tests.bench.samples import broken, instead, read

MASK, PRUNE = Spec("nm_mask", "2:4", "float32", 16, 32), Spec("nm_prune", "2:4", "float32", 16, 32)
LINEAR = Spec("nm_linear", "2:4", "float32", 16, 32, 2)

WRONG_MASK = instead(reference.mask, torch.logical_not)
INEXACT = instead(reference.linear, lambda y: y + 1e-3)
BREAKS = Mock(side_effect=RuntimeError("out of luck"))


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("spec", "does", "why"),
    [
        (MASK, WRONG_MASK, "not timed, its result is wrong: nm_mask: 512 of 512 elements differ"),
        (LINEAR, INEXACT, "not timed, its result is wrong: .*against float64"),
        (MASK, BREAKS, "not timed, it failed: RuntimeError: out of luck"),
    ],
)
def test_what_is_wrong_is_not_timed_and_costs_no_other(spec: Spec, does: Any, why: str, tmp_path: Path) -> None:
    said: list[str] = []
    with broken(spec.op, does, alone=True):
        outcome = runner.run([spec, PRUNE], "cpu", tmp_path / "a.csv", 0.001, complain=said.append)
    assert outcome.status == 1 and [wrong for wrong, _ in outcome.wrong] == [spec] and re.match(why, outcome.wrong[0][1])
    assert said[0].startswith(f"{spec}: not timed") and {r["op"] for r in read(tmp_path / "a.csv")} == {"nm_prune"}


@pytest.mark.slow
def test_provider_that_is_wrong_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with broken("nm_mask", WRONG_MASK, priority=1):
        outcome = runner.run([MASK], "cpu", tmp_path / "a.csv", 0.001)
    why = "timed without nmkernels broken: its result is wrong: nm_mask: 512 of 512 elements differ"
    assert outcome.status == 1 and len(outcome.wrong) == 1 and outcome.wrong[0][1].startswith(why)
    names = " ".join(r["provider"] for r in read(tmp_path / "a.csv"))
    assert "torch copy_" in names and "nmkernels" in names and "broken" not in names
    # an output that was not written is noticed
    with broken("nm_prune", lambda w, n, m, out=None: reference.prune(w, n, m) if out is None else out):
        assert runner.run([PRUNE], "cpu", tmp_path / "b.csv", 0.001).status == 1
    spec = Spec("nm_decompress", "2:4", "float32", 16, 32)
    monkeypatch.setattr("bench.cases.eager.decompress", BREAKS)
    outcome = runner.run([spec], "cpu", tmp_path / "c.csv", 0.001)
    assert outcome.wrong == [(spec, "timed without torch eager: RuntimeError: out of luck")]
    assert "share of copy" in (metrics := {r.metric for r in outcome.rows}) and "x eager" not in metrics


@pytest.mark.quick
def test_interrupt_keeps_what_was_done_and_resume_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Spec] = []
    measure = runner.measure

    def stops(spec: Spec, device: str, seconds: float) -> Any:
        measured.append(spec)
        if spec is PRUNE and len(measured) == 2:
            raise KeyboardInterrupt
        return measure(spec, device, seconds)

    monkeypatch.setattr(runner, "measure", stops)
    out = tmp_path / "a.csv"
    outcome = runner.run([MASK, PRUNE], "cpu", out, 0.001)
    assert outcome.status == 130 and {r["op"] for r in read(out)} == {"nm_mask"}
    outcome = runner.run([MASK, PRUNE], "cpu", out, 0.001, resume=True)
    assert (outcome.status, outcome.skipped, measured) == (0, 1, [MASK, PRUNE, PRUNE])
    assert {r["op"] for r in read(out)} == {"nm_mask", "nm_prune"}
    # rows of another commit do not count
    monkeypatch.setattr(runner, "commit", lambda: "another")
    assert runner.run([MASK], "cpu", out, 0.001, resume=True).skipped == 0


def test_outcomes_are_recorded_and_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, out, current = tmp_path / "record.jsonl", tmp_path / "folder" / "a.csv", []
    monkeypatch.setenv(outcomes.ENV, str(record))

    def measure(spec: Spec, device: str, seconds: float) -> list[Any]:
        current.append(outcomes.read(record).current)
        return BREAKS() if spec is PRUNE else []

    monkeypatch.setattr(runner, "measure", measure)
    runner.run([MASK, PRUNE], "cpu", out, 0.0)
    ended, nothing, *_ = outcomes.read(record)
    assert current == [str(MASK), str(PRUNE)] and nothing == ""
    assert {item: (outcome.what, outcome.why) for item, outcome in ended.items()} == {
        str(MASK): ("passed", ""),
        str(PRUNE): ("failed", "not timed, it failed: RuntimeError: out of luck"),
    }
    assert runner.run([MASK, PRUNE, LINEAR], "cpu", out, 0.0).skipped == 2 and current[2:] == [str(LINEAR)]


def test_every_backend_that_can_is_a_provider(tmp_path: Path) -> None:
    with broken("nm_prune", instead(reference.prune), priority=1):
        outcome = runner.run([PRUNE], "cpu", tmp_path / "a.csv", 0.001)
    assert {"nmkernels broken", "nmkernels broken, new output"} < {r.provider for r in outcome.rows if r.metric == "us"}
    assert os.environ.get(dispatch.ENV) is None


def test_other_instruction_sets_are_proved_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    core = pytest.importorskip("nmkernels._C")
    monkeypatch.setenv("NMKERNELS_BENCH_ISAS", "all")
    before = core.isa()
    work = cases.build(PRUNE, "cpu")
    names = {p.name for p in work.providers if p.check}
    assert {f"nmkernels cpu {isa}" for isa in core.isas() if isa != before} <= names
    runner.gate(work)
    assert core.isa() == before


# ---- timing


def test_providers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(timing, "between", lambda: order.append(".") or 0.0)
    timed = take_turns([Provider(name, partial(order.append, name)) for name in "ab"], "cpu", 0.0, least=4)
    # two of each do not count; an op of torch's is straight before every call
    assert "".join(order[:8]) == ".a.a..b.b"[:8] and len(timed.of("a")) == len(timed.of("b")) == 4
    assert "".join(order).replace("..", ".")[-16:] == ".a.b" * 4
    fast, slow = Provider("fast", lambda: None), Provider("slow", lambda: time.sleep(0.01))
    timed = take_turns([fast, slow], "cpu", 0.05, least=3)
    assert 3 <= len(timed.of("slow")) < len(timed.of("fast")) == len(timed.rounds), "a slow one sits rounds out"
    assert min(timed.of("slow")) >= 0.01


def test_pieces_are_those_of_calls_that_count() -> None:
    samples: list[float] = []
    call = Mock(side_effect=lambda: samples.append(float(call.call_count)))
    timed = take_turns([Provider("a", call, parts={"whole": samples}), Provider("b", lambda: None)], "cpu", 0.0, least=3)
    assert samples == [3.0, 4.0, 5.0] and len(timed.of("a")) == 3, "after two that warm it up"


def test_ratios_are_taken_within_rounds() -> None:
    timed = Timed([{"ours": 1.0, "a": 4.0, "b": 2.0}, {"ours": 2.0, "a": 3.0, "b": 8.0}, {"ours": 5.0, "a": 1.0}])
    sizes = {"ours": 3.0, "a": 6.0, "b": 1.0}
    assert timed.ratio(Ratio("x", "ours", ("a", "b")), sizes) == [2.0, 1.5]
    assert timed.ratio(Ratio("x", "ours", ("a",), "time"), sizes) == [0.25, 2 / 3, 5.0]
    assert timed.ratio(Ratio("x", "ours", ("a",), "rate"), sizes)[:2] == [2.0, 0.75]
    assert timed.ratio(Ratio("x", "ours", ("a", "b"), "more"), sizes) == [-1e6, -1e6]
