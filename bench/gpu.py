"""``make gpu``: build, one call of each kernel, tests, memcheck and benchmarks on a GPU, with a summary of failures at the end.

For a machine with an NVIDIA GPU, torch and pytest installed and no network, where a run may be cut short::

    python -m bench.gpu                                       # every step
    python -m bench.gpu --deadline 570 --out DIR              # stop after 9.5 minutes, with the results as two files in DIR
    python -m bench.gpu --deadline 570 --out DIR --resume gpu.tar.gz    # continue from those, on another machine too
    python -m bench.gpu build benchmarks                      # some steps, in their order
    python -m bench.gpu --tests python_tests/backends/cuda/test_gemm.py
    python -m bench.gpu --dry-run                             # the same steps without a GPU, on the emulator

At the deadline, or at SIGTERM, the summary lists what is left, and the same command continues with it. Earlier results are discarded when
the sources, the versions or the architecture of the GPU change; an H200 continues what an H100 has left. The core is rebuilt only when its
sources change. With a deadline, each step except build and smoke takes at most half of the remaining time, so that every step is reached.
Each test file, family of benchmarks and training recipe runs in its own process, and each test and case has a time limit, so that a crash,
a hang or a lost device costs only one of them. Test files run in parallel; those with a test marked ``alone`` run after the others.

Logs, rows and state are in ``build/gpu``; ``gpu.tar.gz`` in ``--out DIR`` contains all of it, ``summary.txt`` the summary.
``python -m bench.report --add`` adds the rows of an archive to ``bench/results``, on any machine; the step report adds those of this one.

Exit status 0: everything passed. 1: something failed, see the summary. 2: torch can use no GPU here, or there is no step of that name.
3: nothing failed, but some of it is left. 130: interrupted, 143: terminated.
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
from pathlib import Path
from typing import Any

from . import outcomes
from .gpu_steps import STEPS, Step, Visit, digest, say
from .jobs import ROOT, Job, shown

WORK = ROOT / "build"
CLOSING = 10.0
"""Seconds reserved before the deadline for the summary and the archive."""

MOST_WORKERS = 8
"""Each takes half a gigabyte of the GPU in addition to its tensors."""

LENGTH = 8000
"""Characters of failures that the summary shows; beyond that only the number of failures is given."""

SOURCES = ("nmkernels", "csrc", "cmake", "python_tests", "bench", "examples")
ARCHIVE, SUMMARY, FAILED = "gpu.tar.gz", "summary.txt", "failed.txt"


def summary(steps: Sequence[Step], visit: Visit, status: int) -> str:
    """The summary, with failures by step and file; all of them are written to ``failed.txt``."""
    lines, room, path = ["== summary", *map(str, steps)], LENGTH, visit.work / FAILED
    failed: dict[str, list[str]] = {}
    for step in steps:
        for job in step.jobs:
            if reasons := job.reasons():
                failed.setdefault(f"  {step.folder.name}: {job.name.partition(' [')[0]}", []).extend(reasons)
    path.unlink(missing_ok=True)
    if failed:
        lines.append("-- failures")
        for title, reasons in failed.items():
            some = shown(reasons)
            room -= len(title) + sum(map(len, some))
            lines += [f"{title}, {len(reasons)} failed", *(some if room > 0 else ())]
        path.write_text("".join(f"{title}\n    " + "\n    ".join(reasons) + "\n" for title, reasons in failed.items()), encoding="utf-8")
        lines.append(f"  all failures: {path}")
    lines.append(f"  rows in {visit.rows}, logs in {visit.work}")
    verdict = {0: "all passed", 1: "FAILED", 3: "nothing failed so far", 130: "interrupted", 143: "terminated"}[status]
    again = "; the same command continues with what is left" if any(step.left for step in steps) or status > 100 else ""
    return "\n".join([*lines, f"  {verdict}{again}"])


def fingerprint(device: str) -> str:
    """A digest of the sources, the versions and the architecture of the GPU or CPU; results with another digest do not count."""
    from nmkernels.capability import compute_capability

    from .rows import machine, versions

    return digest(SOURCES, machine(device) if device == "cpu" else f"compute capability {compute_capability()}", versions())


def prepare(visit: Visit) -> None:
    """Make the folders, and discard results of other sources."""
    visit.rows.mkdir(parents=True, exist_ok=True)
    path, present = visit.work / "sources.txt", fingerprint(visit.device)
    if path.exists() and path.read_text() != present:
        print("the sources, versions or architecture changed: earlier results are discarded")
        for name in STEPS:
            shutil.rmtree(visit.work / name, ignore_errors=True)
    path.write_text(present)


def pack(visit: Visit, folder: Path | None) -> None:
    """Write the archive atomically, replacing an earlier one."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{ARCHIVE}.part"
    with tarfile.open(part, "w:gz", compresslevel=6) as archive:
        archive.add(visit.work, ".")
    os.replace(part, folder / ARCHIVE)
    if (visit.work / SUMMARY).exists():
        shutil.copy2(visit.work / SUMMARY, folder / SUMMARY)


def unpack(archive: Path, folder: Path) -> None:
    """Replace the folder by the contents of an archive."""
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")


def missing() -> str:
    """Why this machine cannot run the steps; empty if it can."""
    if importlib.util.find_spec("torch") is None:
        return "this Python has no torch; choose another with make gpu PYTHON=..."
    from nmkernels import capability

    can, reason = capability.cuda_device()
    return "" if can else reason


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("steps", nargs="*", metavar="STEP", help=f"{', '.join(STEPS)}; all if none is named")
    add("--deadline", type=float, default=math.inf, metavar="SECONDS", help="time limit for all; another call does the rest")
    add("--out", type=Path, metavar="DIR", help=f"folder for {ARCHIVE} (logs, rows and state) and {SUMMARY}")
    add("--resume", type=Path, metavar="ARCHIVE", help="continue from this archive")
    add("--tests", nargs="+", metavar="PATH", default=(), help="build, then run these test files or folders")
    add("--jobs", type=int, metavar="N", help=f"parallel test processes; default half the CPU cores, at most {MOST_WORKERS}")
    add("--dry-run", action="store_true", help="without a GPU: tests on the emulator, benchmarks on the CPU")
    args = parser.parse_args(argv)
    if unknown := set(args.steps) - set(STEPS):
        parser.error(f"unknown step {', '.join(sorted(unknown))}; choose from {', '.join(STEPS)}")
    if args.resume and not (args.resume.is_file() and tarfile.is_tarfile(args.resume)):
        parser.error(f"--resume {args.resume}: not an archive of an earlier call")
    return args


def main(argv: Sequence[str] | None = None, lacks: Callable[[], str] = missing) -> int:
    """Run the steps, continuing after failures except of the build, and print the summary."""
    start, args = time.monotonic(), parse(argv)
    if not args.dry_run and (reason := lacks()):
        print(f"make gpu: no usable NVIDIA GPU: {reason}")
        return 2
    workers = args.jobs or max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // 2))
    visit = Visit(WORK / ("gpu-dry" if args.dry_run else "gpu"), tuple(args.tests), workers, args.dry_run)
    chosen = args.steps or (("build", "tests") if args.tests else STEPS)
    names = [name for name in STEPS if name in chosen]
    if args.resume:
        unpack(args.resume, visit.work)
    prepare(visit)
    before = signal.signal(signal.SIGTERM, _terminate)
    steps: list[Step] = []
    stopped = 0
    try:
        for name in names:
            now, end = time.monotonic(), start + args.deadline - CLOSING
            share = 1.0 if name in ("build", "smoke", names[-1]) else 0.5
            steps.append(Step(visit.work / name, now + share * (end - now)))
            run(steps[-1], visit)
            pack(visit, args.out)
            if name == "build" and (steps[-1].left or steps[-1].count("failed")):
                break
    except KeyboardInterrupt as stop:
        stopped = 143 if stop.args else 130
    failed, left = any(step.count("failed") for step in steps), any(step.left for step in steps)
    status = stopped or (1 if failed else 3 if left else 0)
    text = summary(steps, visit, status)
    say(text)
    (visit.work / SUMMARY).write_text(f"{text}\n", encoding="utf-8")
    pack(visit, args.out)
    signal.signal(signal.SIGTERM, before)
    return status


def run(step: Step, visit: Visit) -> None:
    """Run one step; an error in the step itself is recorded as a failure."""
    name, start = step.folder.name, time.monotonic()
    say(f"== {name}")
    try:
        STEPS[name](visit, step)
    except Exception as error:  # the other steps still run
        traceback.print_exc()
        job = Job("error", folder=step.folder)
        step.folder.mkdir(parents=True, exist_ok=True)
        job.file.unlink(missing_ok=True)
        outcomes.end(job.file, outcomes.Outcome(name, "failed", f"{type(error).__name__}: {error}"))
        outcomes.tell(job.file, finished=True)
        step.jobs.append(job)
    finally:
        step.seconds = time.monotonic() - start


def _terminate(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the summary must still be written
    raise KeyboardInterrupt("terminated")  # as with Ctrl-C, processes are ended and the summary is printed


if __name__ == "__main__":
    raise SystemExit(main())
