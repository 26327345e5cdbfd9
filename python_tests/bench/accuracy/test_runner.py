"""Many runs: finished ones are skipped, interrupted ones redone, failed ones reported, and the command line does it all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool

import pytest

from bench.accuracy import rows, runner, studies
from bench.accuracy.__main__ import main
from bench.accuracy.plan import Results
from bench.accuracy.worker import attempt

ALONE = "NMKERNELS_TEST_ALONE"


@pytest.fixture
def case(tiny, monkeypatch):
    monkeypatch.setattr(tiny, "settings", tiny.settings.__class__(steps=4, lr=1e-2, tuning_seeds=1, seeds=2, seconds=36))
    return studies.case("tiny", "ste", "2:4")


def test_a_case_is_run_to_its_end_after_an_interruption(case, inline, tmp_path, monkeypatch):
    calls = []

    def stop_at_third(spec):
        calls.append(spec)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return attempt(spec)

    monkeypatch.setattr(runner, "attempt", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        runner.run_cases([case], tmp_path, inline, 1)
    kept = {row.key for row in rows.load(tmp_path)}
    calls.clear()
    monkeypatch.setattr(runner, "attempt", lambda spec: calls.append(spec) or attempt(spec))
    assert runner.run_cases([case], tmp_path, inline, 1) == 0
    results = Results(rows.load(tmp_path))
    assert results.todo(case) == [] and not kept & {spec.key for spec in calls} and kept
    assert set(results.best(case)) == {0, 1}


@pytest.mark.slow
def test_a_killed_worker_loses_only_unfinished_runs(case, tiny, tmp_path, monkeypatch):
    """Also the real pool: processes that find the task in what they were forked from, which must not have trained before."""
    if ALONE not in os.environ:
        words = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-k", "killed_worker", "-p", "no:xdist", "-p", "no:cacheprovider"]
        done = subprocess.run([*words, __file__], env={**os.environ, ALONE: "1"}, capture_output=True, text=True)
        assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
        return
    model = tiny.model
    monkeypatch.setattr(tiny, "model", lambda self: os.kill(os.getpid(), signal.SIGKILL))
    with runner.processes(1) as pool, pytest.raises(BrokenProcessPool):
        runner.run_cases([case], tmp_path, pool, 1)
    assert rows.load(tmp_path) == []
    monkeypatch.setattr(tiny, "model", model)
    with runner.processes(2) as pool:
        assert runner.run_cases([case], tmp_path, pool, 2) == 0
    assert Results(rows.load(tmp_path)).todo(case) == []


def test_failed_runs_are_reported_and_do_not_keep_it_going(case, inline, tmp_path, capsys):
    bad = studies.case("tiny", "ste", "7:9")
    assert runner.run_cases([bad], tmp_path, inline, 1) == 3 and rows.load(tmp_path) == []
    assert "FAILED" in capsys.readouterr().err


def test_the_command_line_runs_resumes_and_reports(case, unforked, tmp_path, capsys):
    words = f"--tasks tiny --methods ste dense --out {tmp_path}".split()
    assert main(["run", *words, "--workers", "1"]) == 0
    count = len(rows.load(tmp_path))
    assert count >= 2 * (3 + 2)
    capsys.readouterr()
    assert main(["run", *words, "--workers", "1"]) == 0 and capsys.readouterr().err == ""
    assert main(["status", *words]) == 0
    said = capsys.readouterr().out
    assert "about 0.0 CPU-hours left" in said and "ste" in said and len(rows.load(tmp_path)) == count


@pytest.mark.parametrize(("words", "near"), [("--tasks gpd", "gpt"), ("--methods oracl", "oracle"), ("matrx", "matrix")])
def test_the_command_line_refuses_unknown_names(words, near, tmp_path, capsys):
    assert main(["run", *words.split(), "--out", str(tmp_path)]) == 2
    assert f"did you mean '{near}'" in capsys.readouterr().err


def test_runs_are_done_again_into_their_own_file(case, unforked, tmp_path):
    key = "tiny/ste/2:4/adamw/0.999/0.01/4/100"
    words = ["run", "--again", key, "--workers", "1", "--out", str(tmp_path)]
    assert main(words) == 0 and main(words) == 0
    (row,) = rows.load(tmp_path, rows.AGAIN)
    assert row.key == key and "threads, " in row.machine and rows.load(tmp_path) == []


def test_folders_are_merged(case, inline, tmp_path):
    for i, method in enumerate(("ste", "sste")):
        runner.run_cases([studies.case("tiny", method, "2:4")], tmp_path / str(i), inline, 1)
    assert main(["merge", str(tmp_path / "0"), str(tmp_path / "1"), "--out", str(tmp_path / "all")]) == 0
    assert {row.method for row in rows.load(tmp_path / "all")} == {"ste", "sste"}
