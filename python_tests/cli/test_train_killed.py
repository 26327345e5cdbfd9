"""Whatever ends a run, at whatever moment: it goes on to the same end, nothing is left lying about, and the reason is a sentence."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")]


def scenario(name: str, folder: Path) -> list[Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "python_tests.cli._killed", name, str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def same_end(whole: dict[str, Any], other: dict[str, Any]) -> None:
    """The same rows but for their speed, the same weights, the same files and no more."""
    assert other["rows"] == whole["rows"]
    assert other["files"] == whole["files"]
    assert other["model"] == whole["model"]


def test_a_run_killed_at_any_change_to_its_folder_goes_on_to_the_same_end(tmp_path):
    """A new run, and one that is resumed where the log has later rows, of which the last is torn."""
    whole, *lines = scenario("kill", tmp_path)
    assert [row[0] for row in whole["rows"]] == ["step", "1", "2", "3", "4", "5"]
    new, (resumed,), later = lines[: whole["moments"]], lines[whole["moments"] :][:1], lines[whole["moments"] + 1 :]
    assert len(new) > 40 and len(later) == resumed["moments"] > 25
    for run in (*new, *later):
        assert run["ends"] == [[-signal.SIGKILL, ""], [0, ""]]
        same_end(whole, run)
    assert all(run["kept"] for run in later)


def test_a_disk_that_fills_up_at_any_change_ends_in_a_sentence(tmp_path):
    whole, *lines = scenario("fill", tmp_path)
    refused = set()
    for run in (line for line in lines if "ends" in line):
        (status, said), end = run["ends"]
        assert end == [0, ""]
        same_end(whole, run)
        if status == 0:  # all that was left to do was to rename a file
            continue
        found = re.fullmatch(
            r"python -m nmkernels train: error: \S*/([^/]+) could not be written: File too large \(\S+ [kMG]B free in \S+\)\."
            r"( \S*/step-\d+\.pt is whole: --resume goes on from there\.)?\n",
            said,
        )
        assert found, said
        assert status == (2 if found[1] == ".nmkernels-train" else 1)
        refused.add(found[1])
    assert {"log.csv", "step-00000004.pt", "model-dense.safetensors", "result.json"} <= refused


def test_a_disk_that_fills_up_under_tensorboard_too(tmp_path):
    pytest.importorskip("tensorboard")
    ((status, said),) = scenario("board", tmp_path)
    assert status == 1
    assert re.fullmatch(r"python -m nmkernels train: error: \S*/tensorboard could not be written: File too large \(.*\)\.\n", said), said


def test_a_folder_has_one_run_at_a_time(tmp_path):
    """Four at once, of which one runs; others while it runs; and no waiting once it was killed."""
    ends, later = scenario("together", tmp_path)
    assert sorted(status for status, _ in ends) == [0, 2, 2, 2]
    who = r"(process \d+ on \S+ has been writing in it since \d{4}-\S+ \S+|another process writes in it)"
    in_use = rf"\S+ is in use: {who}\. Wait for it to end, or use another --out\."
    through = r"\S+ holds (a finished run|a run that was stopped|the beginning of a run)\b.*"
    for status, said in ends:
        assert status == 0 or re.fullmatch(f"python -m nmkernels train: error: ({in_use}|{through})\n", said), said
    for status, said in later["more"]:
        assert status == 2 and f"/second is in use: process {later['pid']} on " in said, said
    assert later["end"] == [0, ""] and later["same"]
