"""``make gpu``: build, one call of each kernel, tests, memcheck and benchmarks on a GPU, with a summary of failures at the end.

For a machine with an NVIDIA GPU, torch installed and no network, where a run may be cut short::

    python -m bench.gpu                                       # every step
    python -m bench.gpu --deadline 570 --out DIR              # stop after 9.5 minutes, with the results as two files in DIR
    python -m bench.gpu --deadline 570 --out DIR --resume gpu.tar.gz    # continue from those, on another machine too
    python -m bench.gpu build benchmarks                      # some steps, in their order
    python -m bench.gpu --tests python_tests/backends/cuda/test_gemm.py
    python -m bench.gpu --dry-run                             # the same steps without a GPU, on the emulator

At the deadline, or at SIGTERM, the summary lists what is left, and the same command continues with it. Earlier results are discarded when
the sources, the versions or the architecture of the GPU change, and with ``--again``; an H200 continues what an H100 has left. The core is
rebuilt only when its sources change. With a deadline, each step except build and smoke takes at most half of the remaining time, so that
every step is reached. Each test file, family of benchmarks and training recipe runs in its own process, and each test and case has a time
limit, so that a crash, a hang or a lost device costs only one of them. Test files run in parallel; those with a test marked ``alone`` run
after the others, one at a time.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .gpu_steps import STEPS, Visit, digest
from .jobs import ROOT, Ended, Job, Pool, shown
from .outcomes import Outcome

WORK = ROOT / "build"
CLOSING = 10.0
"""Seconds reserved before the deadline for the summary and the archive."""

MOST_WORKERS = 8
"""Each takes half a gigabyte of the GPU in addition to its tensors."""

LENGTH = 8000
"""Characters of failures that the summary shows; beyond that only the number of failures is given."""

SOURCES = ("nmkernels", "csrc", "cmake", "python_tests", "bench", "examples")
ARCHIVE, SUMMARY, FAILED = "gpu.tar.gz", "summary.txt", "failed.txt"


class Terminated(KeyboardInterrupt):
    """Raised at SIGTERM; as with Ctrl-C, processes are ended and the summary is printed."""


# ---- the summary


@dataclass
class Done:
    """A step that was started: its name, its pool, and its seconds."""

    name: str
    pool: Pool
    seconds: float = 0.0

    @property
    def left(self) -> list[str]:
        """The jobs left for another call."""
        return [e.job.name for e in self.pool.ended if e.left]

    @property
    def failed(self) -> int:
        """Number of items that failed."""
        return sum(e.count("failed") for e in self.pool.ended)

    def __str__(self) -> str:
        counts = [f"{n} {what}" for what in ("passed", "failed", "skipped") if (n := sum(e.count(what) for e in self.pool.ended))]
        left, note = self.left, self.pool.note
        if left:
            counts.append(f"left: {', '.join(left[:4])}{f' and {len(left) - 4} more' if len(left) > 4 else ''}")
        verdict = "FAILED" if self.failed else "left" if left else "ok" if self.pool.ended else "skipped"
        return f"  {self.name:<12}{self.seconds:>6.0f} s  {verdict:<8}{'; '.join([*counts, *([note] if note else [])])}"


def failures(done: Sequence[Done]) -> dict[str, list[str]]:
    """The failures by step and file: each test or case with the first line of its error."""
    found: dict[str, list[str]] = {}
    for step in done:
        for ended in step.pool.ended:
            if reasons := ended.reasons():
                found.setdefault(f"  {step.name}: {ended.job.name.partition(' [')[0]}", []).extend(reasons)
    return found


def summary(done: Sequence[Done], visit: Visit, status: int) -> str:
    """The summary; all failures are written to ``failed.txt``."""
    lines, room, path = ["== summary", *map(str, done)], LENGTH, visit.work / FAILED
    path.unlink(missing_ok=True)
    if failed := failures(done):
        lines.append("-- failures")
        for title, reasons in failed.items():
            some = shown(reasons)
            room -= len(title) + sum(map(len, some))
            lines += [f"{title}, {len(reasons)} failed", *(some if room > 0 else ())]
        path.write_text("".join(f"{title}\n    " + "\n    ".join(reasons) + "\n" for title, reasons in failed.items()), encoding="utf-8")
        lines.append(f"  all failures: {path}")
    lines.append(f"  rows in {visit.rows}, logs in {visit.work}")
    verdicts = {0: "all passed", 1: "FAILED", 3: "nothing failed so far", 130: "interrupted", 143: "terminated"}
    again = "; the same command continues with what is left" if any(step.left for step in done) or status > 100 else ""
    return "\n".join([*lines, f"  {verdicts[status]}{again}"])


# ---- results of earlier calls


def fingerprint(device: str) -> str:
    """A digest of the sources, the versions and the architecture of the GPU or CPU; results with another digest do not count."""
    from nmkernels.capability import compute_capability

    from .rows import machine, versions

    runs_on = machine(device) if device == "cpu" else f"compute capability {compute_capability()}"
    return digest(SOURCES, runs_on, versions())


def prepare(visit: Visit, names: Sequence[str], again: bool) -> None:
    """Make the folders, and discard results of other sources and of steps to be repeated."""
    visit.rows.mkdir(parents=True, exist_ok=True)
    path, present = visit.work / "sources.txt", fingerprint(visit.device)
    changed = path.exists() and path.read_text() != present
    for name in STEPS if changed else names if again else ():
        shutil.rmtree(visit.work / name, ignore_errors=True)
    if changed:
        print("the sources, versions or architecture changed: earlier results are discarded")
    elif again and "build" in names:
        shutil.rmtree(visit.work / "core", ignore_errors=True)
    path.write_text(present)


def pack(visit: Visit, folder: Path) -> None:
    """Write the archive atomically, replacing an earlier one."""
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


# ---- the command


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
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"{', '.join(STEPS)}; all if none is named")
    parser.add_argument(
        "--deadline",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="time limit for all; another call does the rest",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"folder for {ARCHIVE} (logs, rows and state) and {SUMMARY}")
    parser.add_argument("--resume", type=Path, metavar="ARCHIVE", help="continue from this archive")
    parser.add_argument("--tests", nargs="+", metavar="PATH", default=(), help="build, then run these test files or folders")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help=f"parallel test processes; default half the CPU cores, at most {MOST_WORKERS}"
    )
    parser.add_argument("--again", action="store_true", help="discard the earlier results of these steps")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: tests on the emulator, benchmarks on the CPU")
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
    """Run one step; an error in the step itself is recorded as a failure."""
    _say(f"== {step.name}")
    start = time.monotonic()
    try:
        STEPS[step.name](visit, step.pool)
    except Exception as error:  # the other steps still run
        traceback.print_exc()
        why = f"{type(error).__name__}: {error}"
        step.pool.ended.append(Ended(Job(step.name, ()), {step.name: Outcome(step.name, "failed", why)}, False))
    finally:
        step.seconds = time.monotonic() - start


def _say(text: str) -> None:
    print(text, flush=True)


def _terminate(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the summary must still be written
    raise Terminated


if __name__ == "__main__":
    raise SystemExit(main())
