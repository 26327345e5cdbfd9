"""Runs of ``train`` in forked processes that are killed, starved or crowded: ``python -m python_tests.cli._killed SCENARIO FOLDER``.

A process of its own, which has imported everything before it forks, so that a run costs a tenth of a second; prints what happened as
JSON, a line for each thing.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ._text import train, write_text

SIZES = ["--batch", "8", "--context", "8", "--width", "16", "--layers", "1", "--heads", "1", "--recipe", "srste:2:4"]
SHORT = [*SIZES, "--steps", "5", "--checkpoint-every", "2", "--log-every", "3"]
LONG = [*SIZES, "--steps", "150", "--checkpoint-every", "3", "--log-every", "2"]
WRITES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}


class Child:
    """``train`` in a forked process, which calls ``before`` first; its standard error comes through a pipe."""

    def __init__(self, text: Path, out: Path, *words: str, sizes: list[str], before: Callable[[], object] = lambda: None) -> None:
        self._read, write = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(write)
            return
        status = 99
        try:
            with os.fdopen(write, "w") as file, contextlib.redirect_stderr(file), contextlib.redirect_stdout(io.StringIO()):
                before()
                status = train(text, out, *words, sizes=sizes)
        finally:
            os._exit(status)

    def wait(self) -> tuple[int, str]:
        """The exit status, or minus the signal; and what it printed on standard error."""
        with os.fdopen(self._read) as file:
            said = file.read()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), said


def kill(path: Path | None) -> None:
    """End this process, with ``path`` half written."""
    if path is not None:
        os.truncate(path, path.stat().st_size // 2)
    os.kill(os.getpid(), signal.SIGKILL)


def fill(path: Path | None) -> None:
    """Let the system refuse every write to a file from now on."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def at(out: Path, moment: int, act: Callable[[Path | None], None], count: Path | None = None) -> None:
    """Call ``act`` before this process changes the folder ``out`` for the ``moment``-th time; every ``torch.save`` is a moment too."""
    seen = 0
    handle = os.open(count, os.O_WRONLY | os.O_CREAT) if count is not None else -1

    def step(path: Path | None) -> None:
        nonlocal seen
        seen += 1
        if count is not None:
            os.write(handle, b".")
        if seen == moment:
            act(path)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in WRITES:
            path = "" if isinstance(args[0], int) else os.fsdecode(args[0])
            opened = event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR) and path)
            if not opened and (not path.startswith("/") or path.startswith(str(out))):
                step(None)

    real = torch.save

    def save(state: object, path: Path) -> None:
        if act is fill:
            step(path)
        real(state, path)
        if act is kill:
            step(path)

    torch.save = save
    sys.addaudithook(hook)


def outcome(out: Path) -> dict[str, Any]:
    """What must not depend on what happened to a run on its way."""
    rows = [line.split(",") for line in (out / "log.csv").read_text().splitlines()]
    speed = rows[0].index("tokens_per_s")
    files = sorted(str(p.relative_to(out)) for p in out.rglob("*"))
    return {
        "rows": [row[:speed] + row[speed + 1 :] for row in rows],
        "files": files,
        "model": (out / "model.safetensors").read_bytes().hex(),
    }


def go_on(out: Path) -> str:
    """The option with which to run again: there is something to resume, or not yet."""
    return "--resume" if list((out / "checkpoints").glob("step-*.pt")) else "--overwrite"


def every_moment(folder: Path, text: Path, act: Callable[[Path | None], None], stride: int = 1) -> Iterator[object]:
    """``act`` at every ``stride``-th change of a new run, then at every one of a resumed run; each time let it go on to its end."""
    base = folder / "base"
    whole, moments = counted(folder, text, act)
    yield {"moments": moments, **whole}
    for k in range(1, moments + 1, stride):
        out = folder / f"new{k}"
        first = Child(text, out, sizes=SHORT, before=lambda out=out, k=k: at(out, k, act)).wait()
        log = (out / "log.csv").read_bytes() if (out / "log.csv").exists() else b""
        if not base.exists() and b"\n4," in log and len(list((out / "checkpoints").glob("step-*.pt"))) == 1:
            shutil.copytree(out, base)  # rows 3 and 4 came after the checkpoint of step 2; the last one is torn
            (base / "log.csv").write_bytes(log[:-5])
        yield {"ends": [first, Child(text, out, go_on(out), sizes=SHORT).wait()], **outcome(out)}
        shutil.rmtree(out)
    _, moments = counted(folder, text, act, base)
    yield {"moments": moments}
    for k in range(1, moments + 1, stride):
        out = Path(shutil.copytree(base, folder / f"resumed{k}"))
        first = Child(text, out, "--resume", sizes=SHORT, before=lambda out=out, k=k: at(out, k, act)).wait()
        log = (out / "log.csv").read_bytes()
        yield {"ends": [first, Child(text, out, "--resume", sizes=SHORT).wait()], "kept": b"\n2," in log, **outcome(out)}
        shutil.rmtree(out)


def counted(folder: Path, text: Path, act: Callable[[Path | None], None], base: Path | None = None) -> tuple[dict[str, Any], int]:
    """The outcome of a run that is left alone, and how often it changes its folder."""
    out, count = folder / f"whole{base is None}", folder / f"count{base is None}"
    if base is not None:
        shutil.copytree(base, out)
    words = [] if base is None else ["--resume"]
    assert Child(text, out, *words, sizes=SHORT, before=lambda: at(out, -1, act, count)).wait() == (0, "")
    return outcome(out), count.stat().st_size


def together(folder: Path, text: Path) -> Iterator[object]:
    """Several runs into one new folder; then more while one of them is at it, which is killed; then that one goes on."""
    out = folder / "out"
    yield [child.wait() for child in [Child(text, out, sizes=LONG) for _ in range(4)]]
    whole, out = outcome(out), folder / "second"
    first = Child(text, out, sizes=LONG)
    while not list(out.glob("checkpoints/step-*.pt")):
        time.sleep(0.01)
    more = [Child(text, out, *words, sizes=LONG).wait() for words in ([], ["--resume"], ["--overwrite"])]
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    end = Child(text, out, "--resume", sizes=LONG).wait()
    yield {"pid": first.pid, "more": more, "end": end, "same": outcome(out) == whole}


def board(folder: Path, text: Path) -> Iterator[object]:
    """Fill the disk when TensorBoard begins to write."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and "tfevents" in str(args[0]):
            fill(None)

    yield Child(text, folder / "out", "--tensorboard", sizes=SHORT, before=lambda: sys.addaudithook(hook)).wait()


SCENARIOS: dict[str, Callable[[Path, Path], Iterator[object]]] = {
    "kill": lambda folder, text: every_moment(folder, text, kill),
    "fill": lambda folder, text: every_moment(folder, text, fill, 4),
    "together": together,
    "board": board,
}


def main() -> None:
    """Print one line of JSON for each thing that happened."""
    folder = Path(sys.argv[2])
    text = write_text(folder / "a.txt")
    sys.modules["matplotlib.figure"] = None  # drawing takes longer than the rest
    with contextlib.redirect_stdout(io.StringIO()):
        assert train(text, folder / "warm", sizes=SHORT) == 0
    for line in SCENARIOS[sys.argv[1]](folder, text):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
