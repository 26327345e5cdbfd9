"""train_gpt killed at any moment: the newest checkpoint is whole, the same command continues to the same end, and nothing is left behind.

The test is a process of its own, ``python -m python_tests.examples.test_killed FOLDER``, which has imported everything before it forks, so
that a run costs a fraction of a second.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from python_tests.examples.program import report, run, text_of
from python_tests.house.paths import ROOT

SIZES = ["--batch=8", "--context=8", "--width=16", "--layers=1", "--heads=1", "--steps=3", "--checkpoint-every=1", "--log-every=2"]
WRITES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}


def forked(out: Path, before: Callable[[], object] = lambda: None) -> int:
    """The exit status of a run in a forked process that calls ``before`` first, or minus the signal."""
    if not (process := os.fork()):
        status = 99
        try:
            before()
            with contextlib.redirect_stdout(io.StringIO()):
                run(out.parent / "a.txt", out, sizes=SIZES)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def kill_at(out: Path, moment: int) -> None:
    """Kill this process before it changes the folder ``out`` for the ``moment``-th time."""
    moments = itertools.count(1)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event not in WRITES or isinstance(args[0], int):
            return
        reads = event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR))
        # rmtree names what it removes relative to an open folder
        inside = os.fsdecode(args[0]).startswith(str(out)) or not os.path.isabs(os.fsdecode(args[0]))
        if inside and not reads and next(moments) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def outcome(out: Path) -> tuple[object, ...]:
    """What must not depend on what happened on the way: the rows without their speed, the files, the weights."""
    rows = [line.split(",") for line in (out / "log.csv").read_text().splitlines()]
    speed = rows[0].index("tokens_per_s")
    files = sorted(str(p.relative_to(out)) for p in out.rglob("*"))
    return [row[:speed] + row[speed + 1 :] for row in rows], files, (out / "model.safetensors").read_bytes()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    text_of(folder)
    report.plot = lambda *_: None  # type: ignore[assignment]  # drawing takes longer than the rest
    with contextlib.redirect_stdout(io.StringIO()):
        run(folder / "a.txt", folder / "whole", sizes=SIZES)  # in this process, which has then imported everything
    for moment in itertools.count(1):
        out = folder / f"out{moment}"
        status = forked(out, lambda out=out, moment=moment: kill_at(out, moment))
        finished = len(list((out / "checkpoints").glob("step-*"))) if out.exists() else 0
        assert finished <= 3 and (moment < 30 or finished >= 2)
        assert status == 0 or (status == -signal.SIGKILL and forked(out) == 0), (moment, status)
        assert outcome(out) == outcome(folder / "whole"), moment
        shutil.rmtree(out)
        if status == 0:
            break
    print(moment)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
def test_a_run_that_is_killed_continues_to_the_same_end(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "python_tests.examples.test_killed", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40, "moments at which a run changes its folder"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
