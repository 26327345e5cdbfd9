"""The first contact with a GPU: a line for each family of kernels, whatever becomes of the others."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from bench import outcomes, smoke
from nmkernels import dispatch, reference
from nmkernels.testing.calls import samples
from python_tests.bench.samples import broken, instead

W = torch.randn(8, 16)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The exit status and the lines of a run with few families; outcomes go to ``tmp_path / "outcomes"``."""
    made = {op: (op, args) for op, args in samples().items() if op in ("nm_mask", "nm_prune", "nm_linear")}
    monkeypatch.setattr(smoke, "calls", lambda device: made)
    monkeypatch.setattr(smoke, "BACKENDS", {"cpu": ("broken", "reference")})
    monkeypatch.setattr(sys, "argv", ["smoke", "--device", "cpu"])
    monkeypatch.setenv(outcomes.ENV, str(tmp_path / "outcomes"))

    def call() -> tuple[int, list[str]]:
        return smoke.main(), capsys.readouterr().out.splitlines()

    return call


def test_a_family_that_fails_costs_no_other(run, tmp_path: Path) -> None:
    with broken("nm_mask", instead(reference.mask, torch.logical_not)), broken("nm_prune", lambda *_: 1 / 0):
        status, lines = run()
    assert status == 1 and [line.partition(":")[0] for line in lines[:2]] == ["nm_mask, broken", "nm_mask, reference"]
    assert "FAILED: AssertionError: differed" in lines[0] and "failed: ZeroDivisionError" in lines[2]
    assert all(line.endswith(" ok") for line in (lines[1], *lines[3:])) and len(lines) == 6
    ended = outcomes.read(tmp_path / "outcomes").ended
    assert [o.what for o in ended.values()] == ["failed", "passed", "failed", "passed", "passed", "passed"]
    # the process that follows one that lost the device goes on with the rest
    assert run() == (0, [])


def test_a_process_that_lost_the_device_ends(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "lost", lambda device: "an illegal memory access")
    status, lines = run()
    assert status == 1 and len(lines) == 1 and outcomes.read(tmp_path / "outcomes").lost


def test_a_backend_that_declines_says_why() -> None:
    entry = dispatch.implementations("nm_mask")[-1]
    declines = dataclasses.replace(entry, fits=lambda *_: (False, "it is not the day"))
    assert smoke.check(declines, (W, 2, 4), "cpu") == "declined: it is not the day"
    assert smoke.check(entry, (W, 2, 4), "cpu") == "ok"


def test_the_definition_passes_every_check() -> None:
    made = smoke.calls("cpu")
    assert {op for op, _ in made.values()} == set(dispatch._impls)
    for op, args in made.values():
        (definition,) = (i for i in dispatch.implementations(op) if i.backend == "reference")
        assert smoke.check(definition, args, "cpu") == "ok"
    assert smoke.large("cpu", 128) == "ok"
