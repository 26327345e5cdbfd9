"""Whatever ends a run, at whatever moment: it goes on to the same end, nothing is left lying about, and the reason is a sentence.

Each scenario is a process of its own, ``python -m python_tests.cli.test_train_killed SCENARIO FOLDER``, which has imported everything
before it forks, so that a run costs a tenth of a second.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import train, write_text

ROOT = Path(__file__).resolve().parents[2]
SIZES = ["--batch", "8", "--context", "8", "--width", "16", "--layers", "1", "--heads", "1", "--recipe", "srste:2:4"]
SHORT = [*SIZES, "--steps", "5", "--checkpoint-every", "2", "--log-every", "3"]
LONG = [*SIZES, "--steps", "150", "--checkpoint-every", "3", "--log-every", "2"]
WRITES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
ERROR = "python -m nmkernels train: error: "


def started(out: Path, *words: str, sizes: list[str] = SHORT, before: Callable[[], object] = lambda: None) -> Callable[[], tuple[int, str]]:
    """``train`` in a forked process, which calls ``before`` first; what waits for its exit status, or minus the signal, and its errors."""
    read, write = os.pipe()
    if process := os.fork():
        os.close(write)

        def ended() -> tuple[int, str]:
            with os.fdopen(read) as file:
                said = file.read()
            return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), said

        return ended
    status = 99
    try:
        with os.fdopen(write, "w") as file, contextlib.redirect_stderr(file), contextlib.redirect_stdout(io.StringIO()):
            before()
            status = train(out.parent / "a.txt", out, *words, sizes=sizes)
    finally:
        os._exit(status)


def kill(path: Path | None) -> None:
    """End this process, with ``path`` half written."""
    if path is not None:
        os.truncate(path, path.stat().st_size // 2)
    os.kill(os.getpid(), signal.SIGKILL)


def fill(path: Path | None) -> None:
    """Let the system refuse every write to a file from now on."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def at(out: Path, moment: int, act: Callable[[Path | None], None]) -> None:
    """Call ``act`` before this process changes the folder ``out`` for the ``moment``-th time; every ``torch.save`` is a moment too."""
    moments = itertools.count(1)

    def step(path: Path | None = None) -> None:
        if next(moments) == moment:
            act(path)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in WRITES:
            path = "" if isinstance(args[0], int) else os.fsdecode(args[0])
            opened = event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR) and path)
            if not opened and (not path.startswith("/") or path.startswith(str(out))):
                step()

    real = torch.save

    def save(state: object, path: Path) -> None:
        step()
        real(state, path)
        step(path)

    torch.save = save
    sys.addaudithook(hook)


def outcome(out: Path) -> tuple[object, ...]:
    """What must not depend on what happened to a run on its way: the rows but for their speed, the files, the weights."""
    rows = [line.split(",") for line in (out / "log.csv").read_text().splitlines()]
    speed = rows[0].index("tokens_per_s")
    files = sorted(str(p.relative_to(out)) for p in out.rglob("*"))
    return [row[:speed] + row[speed + 1 :] for row in rows], files, (out / "model.safetensors").read_bytes()


def every_moment(folder: Path, act: Callable[[Path | None], None], stride: int = 1, base: Path | None = None) -> list[tuple[int, str]]:
    """``act`` at every ``stride``-th change of a new run, or of ``base`` resumed, until one ends before; each then goes on to its end.

    What the runs ended with. A run with rows after its checkpoint becomes ``folder``/base, with the last row torn.
    """
    ends, torn = list[tuple[int, str]](), folder / "base"
    for moment in itertools.count(1, stride):
        out = folder / f"out{moment}"
        if base is not None:
            shutil.copytree(base, out)
        ends.append(started(out, *(["--resume"] if base else []), before=lambda out=out, moment=moment: at(out, moment, act))())
        log = (out / "log.csv").read_bytes() if (out / "log.csv").exists() else b""
        saved = list((out / "checkpoints").glob("step-*.pt"))
        assert base is None or b"\n2," in log
        if not torn.exists() and b"\n4," in log and len(saved) == 1:
            shutil.copytree(out, torn)
            (torn / "log.csv").write_bytes(log[:-5])
        if ends[-1] != (0, ""):
            assert started(out, "--resume" if saved else "--overwrite")() == (0, "")
        assert outcome(out) == outcome(folder / "whole"), (moment, ends[-1])
        shutil.rmtree(out)
        if ends[-1] == (0, ""):
            return ends


def killed(folder: Path) -> None:
    """At any change to its folder: a new run, and one that is resumed where the log has later rows, of which the last is torn."""
    for base, least in ((None, 40), (folder / "base", 25)):
        *ends, _ = every_moment(folder, kill, 1, base)
        assert len(ends) > least and set(ends) == {(-signal.SIGKILL, "")}


def full(folder: Path) -> None:
    """A disk that fills up at any change ends in a sentence."""
    refused = set()
    for base in (None, folder / "base"):
        for status, said in every_moment(folder, fill, 4, base)[:-1]:
            found = re.fullmatch(
                rf"{ERROR}\S*/([^/]+) could not be written: File too large \(\S+ [kMG]B free in \S+\)\."
                r"( \S*/step-\d+\.pt is complete: --resume continues from it\.)?\n",
                said,
            )
            assert found and status == (2 if found[1] == ".nmkernels-train" else 1), said
            refused.add(found[1])
    assert {"log.csv", "step-00000004.pt", "model-dense.safetensors", "result.json"} <= refused


def together(folder: Path) -> None:
    """Four into one new folder, of which one runs."""
    who = r"(process \d+ on \S+ has been writing to it since \d{4}-\S+ \S+|another process is writing to it)"
    in_use = rf"\S+ is in use: {who}\. Wait for it to end, or use another --out\."
    through = r"\S+ holds (a finished run|a run that was stopped|the beginning of a run)\b.*"
    ends = [ended() for ended in [started(folder / "out", sizes=LONG) for _ in range(4)]]
    assert sorted(status for status, _ in ends) == [0, 2, 2, 2]
    for status, said in ends:
        assert status == 0 or re.fullmatch(f"{ERROR}({in_use}|{through})\n", said), said


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
@pytest.mark.parametrize("scenario", ["killed", "full", "together"])
def test_a_run_that_is_ended_goes_on_to_the_same_end(tmp_path: Path, scenario: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "python_tests.cli.test_train_killed", scenario, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def main(scenario: str, folder: Path) -> None:
    write_text(folder / "a.txt")
    sys.modules["matplotlib.figure"] = None  # drawing takes longer than the rest
    with contextlib.redirect_stdout(io.StringIO()):
        assert train(folder / "a.txt", folder / "whole", sizes=SHORT) == 0
    globals()[scenario](folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
