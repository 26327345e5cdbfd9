"""A GPU's clock is locked only if asked for, and given back whatever happens; what its ratios say. By a stand-in for nvidia-smi."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import clocks, run, runner
from bench.cases import power_or_port
from bench.cases.power_or_port import DENSE, OURS, verdict
from bench.registry import Provider, Ratio, Spec, Work
from bench.timing import Timed
from nmkernels import NMError
from python_tests.bench.fake_gpu import fake_gpu

PROGRAM = """#!/bin/sh
echo "$*" >> {log}
case "$*" in
  *query*) echo "{mhz}, 640.5";;
  *{word}*) echo "{said}"; exit {status};;
esac
"""
LOCKED, RESTORED = "-i GPU-1 -lgc 900,900", "-i GPU-1 -rgc"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``smi(...)`` says what the stand-in does; the words of its calls are returned."""
    log = tmp_path / "log"
    log.touch()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv(clocks.ASKED, "0")  # put back at the end, also if the test asks

    def write(word: str = "-lgc", said: str = "", status: int = 0, mhz: str = "1755") -> Any:
        program = tmp_path / "nvidia-smi"
        program.write_text(PROGRAM.format(log=log, word=word, said=said, status=status, mhz=mhz))
        program.chmod(0o755)
        return lambda: log.read_text().splitlines()

    return write


def test_the_clock_is_given_back(smi: Any) -> None:
    calls = smi()
    with pytest.raises(ZeroDivisionError), clocks.locked(900, "GPU-1"):
        assert calls() == [LOCKED]
        _ = 1 / 0
    assert calls() == [LOCKED, RESTORED]
    assert clocks.under_load("GPU-1") == (1755.0, 640.5)


@pytest.mark.slow
def test_it_is_given_back_by_a_process_that_dies(smi: Any) -> None:
    calls = smi()
    script = "import os; from bench import clocks; c = clocks.locked(900, 'GPU-1'); c.__enter__(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    for _ in range(100):
        if calls() == [LOCKED, RESTORED]:
            return
        subprocess.run(["sleep", "0.05"])
    pytest.fail(f"{calls()}")


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ("The current user does not have permission to change clocks for GPU 00000000:3B:00.0.", 4),
        ("Setting locked GPU clocks is not supported for GPU 00000000:3B:00.0.", 0),
    ],
)
def test_a_clock_that_cannot_be_set(said: str, status: int, smi: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    smi("-lgc", said, status)
    with pytest.raises(NMError, match=f"cannot be set here .*{said[:30]}"):
        clocks.ask(900, "GPU-1")
    assert clocks.requested() == 0
    smi("-rgc", "no", 3)
    with pytest.raises(NMError, match="nvidia-smi -i GPU-1 -rgc`: no"):
        clocks.ask(900, "GPU-1")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NMError, match="not on PATH"):
        clocks.ask(900, "GPU-1")
    with pytest.raises(NMError, match="such as 900; got 0"):
        clocks.ask(0, "GPU-1")


def test_the_flag_asks_before_anything_is_measured(smi: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--op", "power_or_port", "--lock-clocks", "900", "--device", "cpu"]) == 2
    assert "cpu is not a GPU" in capsys.readouterr().err
    smi("-lgc", "no permission", 4)
    monkeypatch.setattr(runner, "run", lambda *_: pytest.fail("measured"))
    with fake_gpu(monkeypatch):
        monkeypatch.setattr(run, "uuid", lambda device: "GPU-1")
        assert run.main(["--op", "power_or_port", "--lock-clocks", "900", "--device", "cuda"]) == 2
    assert "no permission" in capsys.readouterr().err
    args = run.argparse.Namespace(lock_clocks=900, op=["power_or_port"], targets=False, quick=False, resume=False, out=None)
    for name in ("shapes", "pattern", "dtype", "tokens", "device", "threads", "isas", "seconds"):
        setattr(args, name, None)
    assert run._words(args) == ["--op", "power_or_port", "--lock-clocks", "900"]


def test_verdict_of_the_ratio() -> None:
    wgmma, theirs = OURS
    assert "the port of shared memory allows" in verdict({wgmma: 1.19, theirs: 1.24}, 900)
    assert "power is the bound" in verdict({wgmma: 1.2, theirs: 1.61}, 900) and theirs in verdict({wgmma: 1.2, theirs: 1.61}, 900)
    assert "neither" in verdict({wgmma: 1.4}, 900) and "nothing" in verdict({}, 900)


@pytest.mark.parametrize("asked", [0, 900])
def test_rows_of_both_clocks(asked: int, smi: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls, done = smi(mhz="900"), []
    providers = [Provider(name, lambda: done.append(len(calls()))) for name in (*OURS, "nmkernels triton", DENSE)]
    whole = Work(providers, [Ratio("x dense", name, (DENSE,)) for name in OURS])
    seconds = {OURS[0]: 0.5, OURS[1]: 0.8, DENSE: 1.0}
    turns = lambda some, *_: Timed([{p.name: seconds[p.name] for p in some}], {})  # noqa: E731
    for module in (power_or_port, runner):
        monkeypatch.setattr(module, "take_turns", turns)
    monkeypatch.setattr(power_or_port, "gemms", lambda *_: whole)
    monkeypatch.setattr(power_or_port, "QUEUED", 2)
    if asked:
        clocks.ask(asked, "GPU-1")
    before = calls()
    with fake_gpu(monkeypatch):
        rows = runner.measure(Spec("power_or_port", "2:4", "bfloat16", 64, 64, 64), "cuda", 0.0)
    found = {(r.provider, r.metric): r.p50 for r in rows}
    assert {name for name, _ in found} == {*OURS, DENSE} and found[OURS[0], "x dense"] == 2.0 and found[DENSE, "MHz"] == 900
    assert (OURS[1], "x dense at 900 MHz") in found if asked else not any("at 900" in metric for _, metric in found)
    said = capsys.readouterr().err
    if not asked:
        assert LOCKED not in calls() and "--lock-clocks 900" in said
        return
    assert found[OURS[1], "x dense at 900 MHz"] == 1.25 and found[DENSE, "us at 900 MHz"] == 1e6 and found[DENSE, "W at 900 MHz"] == 640.5
    assert calls()[-1] == RESTORED and calls()[len(before) :].count(LOCKED) == 1 and f"{OURS[0]} is 2.00 times" in said
