"""Stopping and going on: the same bits as without a stop, and no way to go on with the wrong thing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from nmkernels.cli import train as loop
from nmkernels.cli.log import read_log
from nmkernels.models import GPT
from nmkernels.testing import equal_bits

from .conftest import train

ROOT = Path(__file__).resolve().parents[2]


def signal_at(monkeypatch: pytest.MonkeyPatch, at: int, number: signal.Signals = signal.SIGINT, dense: bool = False) -> None:
    """Send this process a signal in the middle of step ``at``, of the baseline where ``dense``."""
    real = loop.Trainer.step

    def step(self, n):
        if n == at and (self.handle is None) is dense:
            os.kill(os.getpid(), number)
        return real(self, n)

    monkeypatch.setattr(loop.Trainer, "step", step)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("recipe", "at"),
    # STEP before, at and after its switch
    [
        *(("step:2:4", at) for at in (5, 1, 9)),
        *((spec, 5) for spec in ("srste:1:4", "asp:2:4", "sste:2:4", "mdgf:1:8", "sdgf:1:8")),
    ],
)
def test_a_stopped_run_ends_with_the_same_bits(text, tmp_path, monkeypatch, capsys, recipe, at):
    switch = ["--set", "switch=fixed", "--set", "start=5"] if recipe.startswith("step") else []
    assert train(text, tmp_path / "whole", "--recipe", recipe, *switch) == 0
    with monkeypatch.context() as patch:
        signal_at(patch, at, signal.SIGTERM if at == 5 else signal.SIGINT)
        assert train(text, tmp_path / "parts", "--recipe", recipe, *switch) == 130
    error = capsys.readouterr().err
    assert f"Stopped after step {at}; saved in" in error
    assert f"--out {tmp_path / 'parts'} --resume --data {text}" in error
    torch.randn(7)  # another state of the global generator must not matter
    assert train(text, tmp_path / "parts", "--resume", sizes=["--log-every", "3"]) == 0
    a, b = (torch.load(tmp_path / name / "checkpoints" / "step-00000012.pt", weights_only=True) for name in ("whole", "parts"))
    for key in ("model", "optimizer", "config", "step", "corpus"):
        assert equal_bits(a[key], b[key]), key
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (tmp_path / "parts" / "model.safetensors").read_bytes()
    logs = [read_log(tmp_path / name / "log.csv") for name in ("whole", "parts")]
    for row in (*logs[0], *logs[1]):
        assert row.pop("tokens_per_s") > 0
    assert logs[0] == logs[1] and len(logs[0]) >= 4


@pytest.mark.slow
def test_a_stop_in_the_baseline_resumes_the_baseline(text, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        signal_at(patch, 5, dense=True)
        assert train(text, tmp_path / "parts", "--baseline") == 130
    before = (tmp_path / "parts" / "checkpoints" / "step-00000012.pt").stat().st_mtime_ns
    assert train(text, tmp_path / "parts", "--baseline", "--resume", sizes=[]) == 0
    assert (tmp_path / "parts" / "checkpoints" / "step-00000012.pt").stat().st_mtime_ns == before
    assert train(text, tmp_path / "whole", "--baseline") == 0
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "parts")]
    assert len({(r["baseline"]["val_loss"], r["sparse"]["val_loss"]) for r in results}) == 1


def test_signal_handlers(text, tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def step(self, n):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        raise AssertionError("the second signal should have interrupted")

    monkeypatch.setattr(loop.Trainer, "step", step)
    assert train(text, tmp_path / "out") == 130
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.fixture(scope="module")
def stopped_once(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stopped") / "out"
    with pytest.MonkeyPatch.context() as patch:
        signal_at(patch, 8)
        assert train(text, out, "--checkpoint-every", "2") == 130
    return out


@pytest.fixture
def stopped(stopped_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped_once, tmp_path / "out"))


def test_a_folder_with_a_run_is_protected(stopped, text, tmp_path, capsys):
    assert train(text, stopped) == 2
    assert "holds a run that was stopped. Continue it with --resume" in capsys.readouterr().err
    assert train(tmp_path / "missing", stopped, "--overwrite") == 2  # which keeps the old run if the new one cannot start
    assert sorted(p.name for p in (stopped / "checkpoints").iterdir()) == ["step-00000006.pt", "step-00000008.pt"]
    assert train(text, stopped, "--resume", sizes=[]) == 0
    assert train(text, stopped) == 2
    assert "holds a finished run" in capsys.readouterr().err
    assert train(text, stopped, "--resume", sizes=[]) == 0  # nothing left to do but to show it again


def test_another_run_s_checkpoint_is_refused(stopped, text, capsys):
    for options, message in (
        (["--recipe", "step:2:4"], "recipe is srste:2:4 there and step:2:4 here"),
        (["--width", "64", "--seed", "1"], "width is 32 there and 64 here; seed is 0 there and 1 here"),
        (["--set", "decay=1"], "options is {'decay': 2.0} there and {'decay': 1} here"),
        (["--demo"], "steps is 12 there and 800 here; batch is 2 there and 4 here; width is 32 there and 256 here"),
    ):
        assert train(text, stopped, "--resume", *options, sizes=[]) == 2
        error = capsys.readouterr().err
        assert message in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("keep", [0, -1])
def test_a_truncated_checkpoint_names_the_one_before(stopped, text, capsys, keep):
    newest, earlier = stopped / "checkpoints" / "step-00000008.pt", stopped / "checkpoints" / "step-00000006.pt"
    newest.write_bytes(newest.read_bytes()[:keep])
    assert train(text, stopped, "--resume", sizes=[]) == 2
    error = capsys.readouterr().err
    assert f"{newest} is damaged" in error and f"--resume {earlier}" in error and len(error.splitlines()) == 1
    assert train(text, stopped, "--resume", str(earlier), sizes=["--checkpoint-every", "1"]) == 0
    assert sorted(p.name for p in (stopped / "checkpoints").iterdir())[:2] == ["step-00000008.pt.aside", "step-00000011.pt"]


def test_checkpoints_that_are_not_ours(stopped, text, tmp_path, capsys):
    store = stopped / "checkpoints"
    (store / "step-00000006.pt").unlink()
    torch.save({"step": 8}, store / "step-00000008.pt")
    assert train(text, stopped, "--resume", sizes=[]) == 2
    assert "was not written by this version" in capsys.readouterr().err
    torch.save(GPT, store / "step-00000008.pt")  # arbitrary code is never loaded
    assert train(text, stopped, "--resume", sizes=[]) == 2
    assert "There is no earlier one; start a new run with --overwrite" in capsys.readouterr().err
    assert train(text, tmp_path / "none", "--resume") == 2
    assert "there is no checkpoint in" in capsys.readouterr().err
    assert train(text, tmp_path / "none", "--resume", str(tmp_path / "x.pt")) == 2
    assert "there is no checkpoint " in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
