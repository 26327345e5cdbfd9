"""What ``make gpu`` runs: build, one call of each kernel, tests, memcheck, benchmarks, the rest; a summary of what failed comes last.

For a machine with an NVIDIA GPU, a torch already installed and no network, and for visits to it that are cut short::

    python -m bench.gpu                                       # every step
    python -m bench.gpu --deadline 570 --out DIR              # in 9.5 minutes, and what came of it as two files in DIR
    python -m bench.gpu --deadline 570 --out DIR --resume gpu.tar.gz    # on with that on another machine
    python -m bench.gpu build benchmarks                      # some steps, in their order
    python -m bench.gpu --tests python_tests/backends/cuda/test_gemm.py
    python -m bench.gpu --dry-run                             # the same steps without a GPU: the emulator in its place

When time is up, or at a SIGTERM, the summary says what was left, and the same command goes on with that. What was done is forgotten when
the sources, the versions or the architecture of the GPU change, and with ``--again``: an H200 goes on with what an H100 has left. A core is
built again only when its own sources change. With a deadline no step but build and smoke takes more than half of the time that is left, so
that each gets a turn. Each test file, family of benchmarks and training recipe has a process of its own, and each test and case a limit:
what crashes, hangs or loses the device costs one of them. Test files run side by side, those with a test marked ``alone`` after the others,
one at a time.

Logs, rows and state are in ``build/gpu``; ``gpu.tar.gz`` in ``--out DIR`` has all of it, ``summary.txt`` what was printed last.
``python -m bench.report --add`` adds the rows of an archive to ``bench/results``, on any machine; the step report adds those of this one.

Exit status 0: everything passed. 1: something failed, the summary says what. 2: there is no GPU here that torch can use, or no step of that
name. 3: nothing failed, and some of it is left. 130: interrupted, 143: terminated.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shutil
import signal
import tarfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .gpu_steps import STEPS, Visit, digest
from .jobs import ROOT, Ended, Job, Pool, shown
from .outcomes import Outcome

WORK = ROOT / "build"
CLOSING = 10.0
"""Seconds before the deadline that are for the summary and the archive."""

MOST_WORKERS = 8
"""Each holds half a gigabyte of the GPU beside its tensors."""

LENGTH = 8000
"""Characters of failures that the summary shows; of each it says that it is there."""

SOURCES = ("nmkernels", "csrc", "cmake", "python_tests", "bench")
ARCHIVE, SUMMARY, FAILED = "gpu.tar.gz", "summary.txt", "failed.txt"


class Terminated(KeyboardInterrupt):
    """By SIGTERM: as after ctrl-C, processes are ended and the summary is printed."""


# ---- the summary


@dataclass
class Done:
    """A step that was begun: its name, what its pool ran, and how long it took."""

    name: str
    pool: Pool
    seconds: float = 0.0

    @property
    def left(self) -> list[str]:
        """The jobs that another call is to go on with."""
        return [e.job.name for e in self.pool.ended if e.left]

    @property
    def failed(self) -> int:
        """Items that failed."""
        return sum(e.count("failed") for e in self.pool.ended)

    def __str__(self) -> str:
        counts = [f"{n} {what}" for what in ("passed", "failed", "skipped") if (n := sum(e.count(what) for e in self.pool.ended))]
        left, note = self.left, self.pool.note
        if left:
            counts.append(f"left: {', '.join(left[:4])}{f' and {len(left) - 4} more' if len(left) > 4 else ''}")
        verdict = "FAILED" if self.failed else "left" if left else "ok" if self.pool.ended else "skipped"
        return f"  {self.name:<12}{self.seconds:>6.0f} s  {verdict:<8}{'; '.join([*counts, *([note] if note else [])])}"


def failures(done: Sequence[Done]) -> dict[str, list[str]]:
    """What failed, by step and file: each test or case with the first line of its error."""
    found: dict[str, list[str]] = {}
    for step in done:
        for ended in step.pool.ended:
            if reasons := ended.reasons():
                found.setdefault(f"  {step.name}: {ended.job.name.partition(' [')[0]}", []).extend(reasons)
    return found


def summary(done: Sequence[Done], visit: Visit, status: int) -> str:
    """The last words; what failed is told in full in ``failed.txt``."""
    lines, room, path = ["== summary", *map(str, done)], LENGTH, visit.work / FAILED
    path.unlink(missing_ok=True)
    if failed := failures(done):
        lines.append("-- what failed")
        for title, reasons in failed.items():
            some = shown(reasons)
            room -= len(title) + sum(map(len, some))
            lines += [f"{title}, {len(reasons)} failed", *(some if room > 0 else ())]
        path.write_text("".join(f"{title}\n    " + "\n    ".join(reasons) + "\n" for title, reasons in failed.items()), encoding="utf-8")
        lines.append(f"  in full: {path}")
    lines.append(f"  rows in {visit.rows}, logs in {visit.work}")
    verdicts = {0: "all passed", 1: "FAILED", 3: "nothing failed so far", 130: "interrupted", 143: "terminated"}
    again = "; the same command goes on with what is left" if any(step.left for step in done) or status > 100 else ""
    return "\n".join([*lines, f"  {verdicts[status]}{again}"])


# ---- what an earlier call did


def fingerprint(device: str) -> str:
    """Of the sources, the versions, and the architecture of the GPU or the CPU: what was done with others does not count."""
    from nmkernels.capability import compute_capability

    from .rows import machine, versions

    runs_on = machine(device) if device == "cpu" else f"compute capability {compute_capability()}"
    return digest(SOURCES, runs_on, versions())


def prepare(visit: Visit, names: Sequence[str], again: bool) -> None:
    """Make the folders, and forget what was done with other sources or is to be done again."""
    visit.rows.mkdir(parents=True, exist_ok=True)
    path, present = visit.work / "sources.txt", fingerprint(visit.device)
    changed = path.exists() and path.read_text() != present
    for name in STEPS if changed else names if again else ():
        shutil.rmtree(visit.work / name, ignore_errors=True)
    if changed:
        print("the sources, versions or architecture changed: what was done before is forgotten")
    elif again and "build" in names:
        shutil.rmtree(visit.work / "core", ignore_errors=True)
    path.write_text(present)


def pack(visit: Visit, folder: Path) -> None:
    """Write the archive; the one of before is there until this one is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{ARCHIVE}.part"
    with tarfile.open(part, "w:gz", compresslevel=6) as archive:
        archive.add(visit.work, ".")
    os.replace(part, folder / ARCHIVE)
    if (visit.work / SUMMARY).exists():
        shutil.copy2(visit.work / SUMMARY, folder / SUMMARY)


def unpack(archive: Path, folder: Path) -> None:
    """Put what an archive has in place of what is in the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")


# ---- the command


def missing() -> str:
    """Why this machine cannot do it, in words; empty when it can."""
    if importlib.util.find_spec("torch") is None:
        return "this Python has no torch; choose another with make gpu PYTHON=..."
    from nmkernels import capability

    can, reason = capability.cuda_device()
    return "" if can else reason


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"{', '.join(STEPS)}; all if none is named")
    parser.add_argument(
        "--deadline", type=float, default=math.inf, metavar="SECONDS", help="for all of it; what is left is for another call"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"also put {ARCHIVE}, with logs, rows and state, and {SUMMARY} there")
    parser.add_argument("--resume", type=Path, metavar="ARCHIVE", help="go on with what this one says was done")
    parser.add_argument("--tests", nargs="+", metavar="PATH", default=(), help="build, and run these test files or folders")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help=f"test processes at a time, by default half the CPU cores, at most {MOST_WORKERS}"
    )
    parser.add_argument("--again", action="store_true", help="do once more what these steps did before")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: tests on the emulator, benchmarks on the CPU")
    args = parser.parse_args(argv)
    if unknown := set(args.steps) - set(STEPS):
        parser.error(f"no step is called {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    if args.resume and not (args.resume.is_file() and tarfile.is_tarfile(args.resume)):
        parser.error(f"--resume {args.resume}: no archive of an earlier call is there")
    return args


def main(argv: Sequence[str] | None = None, lacks: Callable[[], str] = missing) -> int:
    """Run the steps, each also after one that failed, and print the summary; without a finished build nothing else."""
    start, args = time.monotonic(), parse(argv)
    if not args.dry_run and (reason := lacks()):
        print(f"make gpu: no NVIDIA GPU to use here: {reason}")
        return 2
    workers = args.jobs or max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // 2))
    visit = Visit(WORK / ("gpu-dry" if args.dry_run else "gpu"), tuple(args.tests), workers, args.dry_run)
    chosen = args.steps or (("build", "tests") if args.tests else STEPS)
    if args.resume:
        unpack(args.resume, visit.work)
    names = [name for name in STEPS if name in chosen]
    prepare(visit, names, args.again)
    before = signal.signal(signal.SIGTERM, _terminate)
    done: list[Done] = []
    stopped = 0
    try:
        for name in names:
            now, end = time.monotonic(), start + args.deadline - CLOSING
            share = 1.0 if name in ("build", "smoke", names[-1]) else 0.5
            done.append(Done(name, Pool(visit.work / name, now + share * (end - now), _say)))
            run(done[-1], visit)
            if args.out:
                pack(visit, args.out)
            if name == "build" and (done[-1].left or done[-1].failed):
                break
    except KeyboardInterrupt as stop:
        stopped = 143 if isinstance(stop, Terminated) else 130
    failed, left = any(step.failed for step in done), any(step.left for step in done)
    status = stopped or (1 if failed else 3 if left else 0)
    text = summary(done, visit, status)
    _say(text)
    (visit.work / SUMMARY).write_text(f"{text}\n", encoding="utf-8")
    if args.out:
        pack(visit, args.out)
    signal.signal(signal.SIGTERM, before)
    return status


def run(step: Done, visit: Visit) -> None:
    """Run one step; an error of its own is one of its failures."""
    _say(f"== {step.name}")
    start = time.monotonic()
    try:
        STEPS[step.name](visit, step.pool)
    except Exception as error:  # of one step; the others run
        traceback.print_exc()
        why = f"{type(error).__name__}: {error}"
        step.pool.ended.append(Ended(Job(step.name, ()), {step.name: Outcome(step.name, "failed", why)}, False))
    finally:
        step.seconds = time.monotonic() - start


def _say(text: str) -> None:
    print(text, flush=True)


def _terminate(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once; the summary is to come
    raise Terminated


if __name__ == "__main__":
    raise SystemExit(main())
