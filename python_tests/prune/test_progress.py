"""The time left over all stages of a run, and how it is shown."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from nmkernels.prune import progress as module
from nmkernels.prune import prune_
from nmkernels.prune.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets, and no trust in what is assumed."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module, "TRUST", 1e-9)
    return now


def test_time_left_is_that_of_all_kinds_at_their_measured_rates(clock):
    progress = Progress()
    progress._flops = 1.0
    assert progress.left() is None
    progress.plan("read", 8 * module.BYTES)
    assert progress.left() == pytest.approx(8)  # as assumed
    progress.plan("solve", 10)
    clock[0] = 4.0
    progress.did("read", 2 * module.BYTES)
    clock[0] = 10.0
    progress.did("solve", 4)
    assert progress.left() == pytest.approx(6 * 2 + 6 * 1.5)
    clock[0] = 11.0  # a step takes a while
    assert progress.left() == pytest.approx(20)
    progress.plan("read", 1)  # what is done is done
    assert progress.left() == pytest.approx(8)


def test_a_terminal_has_one_bar(monkeypatch, capsys):
    pytest.importorskip("tqdm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(module, "BAR", 0.01)
    with Progress(True) as progress:
        progress.plan("read", 100 * module.BYTES)
        progress(2, 3, "pruning block.2")
        while "pruning block.2 (3 of 3)" not in (said := capsys.readouterr().err):
            pass
        progress.note("note: a line above")
    assert "  0%|" in said and "0:01:40 left, " in said
    assert "note: a line above\n" in (said := capsys.readouterr().err) and "100%|" in said and "done in 0:00:00" in said


@pytest.mark.parametrize("tqdm", [True, False], ids=["no terminal", "no tqdm"])
def test_elsewhere_there_are_lines(monkeypatch, capsys, tqdm):
    if not tqdm:
        monkeypatch.setitem(sys.modules, "tqdm", None)
        monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(module, "BAR", 0.01)
    with Progress(True) as progress:
        progress.plan("read", 100 * module.BYTES)
        progress(0, 3, "pruning block.0")
        progress(1, 3, "pruning block.1")  # not another stage
        first = capsys.readouterr().err
        monkeypatch.setattr(module, "LINES", 0.0)
        while not (later := capsys.readouterr().err):
            pass
    assert first == "0 %, 0:01:40 left, pruning block.0 (1 of 3)\n"
    assert later.startswith("0 %, 0:01:40 left, pruning block.1 (2 of 3)\n")


@pytest.mark.parametrize("sequential", [True, False])
def test_prune_plans_what_it_does(monkeypatch, capsys, sequential):
    """All that is planned is done in the end, but for the trial, which is guessed; an error ends the lines."""
    made = []
    monkeypatch.setattr("nmkernels.prune.prune.Progress", lambda *args: made.append(Progress(*args)) or made[0])
    block = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model = nn.Sequential(nn.Linear(64, 64), nn.ModuleList([block]), nn.Linear(64, 32))
    model.forward = lambda x: model[2](block(model[0](x)))
    prune_(model, "2:4", list(torch.randn(3, 40, 64)), method="wanda", sequential=sequential, progress=True)
    done = made[0]
    assert done.done == pytest.approx({kind: done.planned[kind] for kind in done.done}) and done.done["solve"] > 0
    said = capsys.readouterr().err
    assert " left, " in said and "\ndone in 0:00:00\n" in said
    made.clear()
    with pytest.raises(Exception, match="cannot run batch 1"):
        prune_(nn.Sequential(nn.Linear(64, 64)), "2:4", [torch.randn(4, 32)], progress=True)
    assert "done in" not in capsys.readouterr().err and not made[0]._thread.is_alive()
