"""Many runs: finished ones are skipped, interrupted ones redone, failed ones reported, and the command line does it all."""

from __future__ import annotations

import os
import signal
from concurrent.futures.process import BrokenProcessPool

import pytest

from bench.accuracy import plan as planning
from bench.accuracy import rows, runner, traces
from bench.accuracy.__main__ import main
from bench.accuracy.plan import best_rates, pending, plan
from bench.accuracy.spec import RunSpec
from bench.accuracy.worker import attempt

SPECS = [RunSpec("tiny", method, "2:4", seed, 1e-2, 50, purpose="shared") for seed in (0, 1) for method in ("ste", "srste")]


def run(specs, folder, inline):
    return runner.run_all(specs, folder, inline, 1, tell=lambda text: None)


def test_an_interrupted_run_is_redone(tiny, inline, tmp_path, monkeypatch):
    calls = []

    def stop_at_third(spec):
        calls.append(spec)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return attempt(spec)

    monkeypatch.setattr(runner, "attempt", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        run(SPECS, tmp_path, inline)
    monkeypatch.setattr(runner, "attempt", attempt)
    left = pending(SPECS, rows.load(tmp_path))
    assert calls[2] in left and len(left) < len(SPECS)
    run(left, tmp_path, inline)
    assert pending(SPECS, rows.load(tmp_path)) == []
    assert {line["run"] for line in traces.load(tmp_path, "tiny")} == {s.key for s in SPECS}


@pytest.mark.slow
def test_a_killed_worker_loses_only_unfinished_runs(tiny, tmp_path, monkeypatch):
    """Also the real pool: processes that find the task in what they were forked from."""
    model = tiny.model
    monkeypatch.setattr(tiny, "model", lambda self: os.kill(os.getpid(), signal.SIGKILL))
    with runner.processes(1) as pool, pytest.raises(BrokenProcessPool):
        runner.run_all(SPECS[:1], tmp_path, pool, 1, tell=lambda text: None)
    assert rows.load(tmp_path) == []
    monkeypatch.setattr(tiny, "model", model)
    with runner.processes(2) as pool:
        assert runner.run_stage(lambda done: SPECS, tmp_path, pool, 2, tell=lambda text: None) == (len(SPECS), 0)
    assert pending(SPECS, rows.load(tmp_path)) == []


def test_failed_runs_are_reported_and_tried_again(tiny, inline, tmp_path):
    bad = RunSpec("tiny", "ste", "7:9", 0, 1e-2, 50)
    said: list[str] = []
    failed = runner.run_all([bad, SPECS[0]], tmp_path, inline, 1, tell=said.append)
    assert [f.spec for f in failed] == [bad] and "FAILED" in "".join(said)
    assert pending([bad, SPECS[0]], rows.load(tmp_path)) == [bad]


@pytest.mark.slow
def test_a_stage_that_grows_is_run_to_its_end(tiny, inline, tmp_path):
    def wanted(done):
        return plan("tune", "tiny", done, ["ste"], ["2:4"], optimizers=["adamw"])

    assert runner.run_stage(wanted, tmp_path, inline, 1, limit=4, tell=lambda text: None) == (4, 0)
    did, failed = runner.run_stage(wanted, tmp_path, inline, 1, tell=lambda text: None)
    done = rows.load(tmp_path)
    found = best_rates(done, "tiny")["ste", "2:4"]
    assert failed == 0 and did == len(done) - 4 == 3 * len(found.losses) - 4 and found.over
    assert {line["run"] for line in traces.load(tmp_path, "tiny")} == {r.spec.key for r in done if r.seed == 100}


def test_failed_runs_do_not_keep_a_stage_going(tiny, inline, tmp_path):
    bad = RunSpec("tiny", "ste", "7:9", 0, 1e-2, 50)
    assert runner.run_stage(lambda done: [bad, SPECS[0]], tmp_path, inline, 1, tell=lambda text: None) == (2, 1)


@pytest.mark.slow
def test_command_line_runs_resumes_and_reports(tiny, tmp_path, capsys):
    words = f"--stages shared --tasks tiny --methods ste dense --patterns 2:4 --optimizers adamw --seeds 2 --out {tmp_path}".split()
    assert main(["run", *words, "--workers", "1", "--limit", "3"]) == 0
    assert len(rows.load(tmp_path)) == 3
    capsys.readouterr()
    assert main(["status", *words]) == 0
    said = capsys.readouterr().out
    assert "tiny shared: 3 of 4 runs done, 0.01 CPU-hours left" in said and "ste" in said
    assert main(["run", *words, "--workers", "1"]) == 0
    assert "1 runs to do" in capsys.readouterr().err and len(rows.load(tmp_path)) == 4


@pytest.mark.parametrize(("option", "wrong", "near"), [("tasks", "gpd", "gpt"), ("methods", "stepp", "step"), ("stages", "shar", "shared")])
def test_command_line_refuses_unknown_names(option, wrong, near, tmp_path, capsys):
    assert main(["run", f"--{option}", wrong, "--out", str(tmp_path)]) == 2
    assert f"did you mean '{near}'" in capsys.readouterr().err


@pytest.mark.slow
def test_repeats_go_to_their_own_file_once_per_machine(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(planning, "REPEATED", (("tiny", "ste", "2:4"),))
    words = f"run --stages repeat --tasks tiny --workers 1 --out {tmp_path}".split()
    assert main(words) == 0 and main(words) == 0
    (row,) = rows.load(tmp_path, rows.REPEATS)
    assert (row.purpose, row.seed, row.lr) == ("repeat", 100, 1e-2) and "threads, " in row.machine
    assert rows.load(tmp_path) == [] and "0 runs to do" in capsys.readouterr().err


@pytest.mark.slow
def test_folders_are_merged(tiny, inline, tmp_path):
    for i in (0, 1):
        run(SPECS[2 * i : 2 * i + 2], tmp_path / str(i), inline)
    assert main(["merge", str(tmp_path / "0"), str(tmp_path / "1"), "--out", str(tmp_path / "all")]) == 0
    assert pending(SPECS, rows.load(tmp_path / "all")) == []
    assert {line["run"] for line in traces.load(tmp_path / "all", "tiny")} == {s.key for s in SPECS}
