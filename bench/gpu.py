"""What ``make gpu`` runs: build in place, the tests marked gpu, compute-sanitizer, quick benchmarks, loss
curves, the README's table, a summary last.

For a machine with an NVIDIA GPU, a torch already installed and no network. ``python -m bench.gpu tests benchmarks`` runs only those
steps. Exit status 0: everything passed, 1: something failed (the summary says what), 2: there is no GPU here that torch can use, or
no step of that name.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_TESTS_COLLECTED = 5
NO_CASE_LEFT = 2
NO_SANITIZER = 4
Runner = Callable[[list[str]], int]


@dataclass(frozen=True)
class Step:
    """One step: its name, what it runs with this Python, and exit statuses other than 0 that are fine, with the reason."""

    name: str
    words: tuple[str, ...]
    fine: tuple[tuple[int, str], ...] = ()


STEPS = (
    Step("build", ("setup.py", "build_ext", "--inplace")),
    Step("tests", ("-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"), ((NO_TESTS_COLLECTED, "no test is marked gpu yet"),)),
    Step("sanitizer", ("-m", "bench.sanitize"), ((NO_SANITIZER, "skipped: compute-sanitizer is not installed"),)),
    Step("benchmarks", ("-m", "bench.quick", "--device", "cuda")),
    Step("curves", ("-m", "bench.loss_curves")),
    Step("report", ("-m", "bench.report")),
)


def missing() -> str:
    """Why this machine cannot do it, in words; empty when it can."""
    if importlib.util.find_spec("torch") is None:
        return f"{sys.executable} has no torch; choose another with make gpu PYTHON=..."
    from nmkernels import _capability

    can, reason = _capability.cuda_device()
    return "" if can else reason


def run(words: list[str]) -> int:
    """Run this Python with ``words`` at the repository's root, its output shown as it comes; the exit status."""
    env = {"NMKERNELS_CUDA": "auto", **os.environ}
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=env).returncode


def surviving(words: list[str], runner: Runner, out: Path | None) -> int:
    """``runner(words)``; where a signal ended a run of benchmarks (a compiler that crashed), further runs of the cases after that one."""
    status = found = runner(words)
    if status >= 0 or out is None:
        return status
    from .runner import running

    while status < 0 and running(out).exists():
        number, case = running(out).read_text().split(" ", 1)
        running(out).unlink()
        print(f"{case}: not timed, its process was ended by signal {-status}; on with the next", flush=True)
        status = runner([*words, "--from", str(int(number) + 1)])
        status = 0 if status == NO_CASE_LEFT else status
    return found


def results() -> Path | None:
    """The file that the benchmarks write; None without a GPU."""
    import torch

    from .rows import RESULTS, machine, slug

    return RESULTS / f"{slug(machine('cuda'))}.csv" if torch.cuda.is_available() else None


def main(lacks: Callable[[], str] = missing, runner: Runner = run, names: Sequence[str] = ()) -> int:
    """Run every step, or those named, also after one that failed, then print the summary."""
    if unknown := set(names) - {step.name for step in STEPS}:
        print(f"make gpu: no step is called {', '.join(sorted(unknown))}; there are {', '.join(step.name for step in STEPS)}")
        return 2
    if reason := lacks():
        print(f"make gpu: no NVIDIA GPU to use here: {reason}")
        return 2
    lines, failed, out = [], False, results()
    for step in (step for step in STEPS if not names or step.name in names):
        print(f"== {step.name}", flush=True)
        start = time.perf_counter()
        status = surviving(list(step.words), runner, out)
        note = dict(step.fine).get(status, "")
        good = status == 0 or bool(note)
        failed |= not good
        verdict = "ok" if good else f"FAILED, exit status {status}"
        lines.append(f"  {step.name:<12}{time.perf_counter() - start:>7.1f} s  {verdict}{f' ({note})' if note else ''}")
    where = [f"  rows in {out.relative_to(ROOT)}; commit it with README.md and bench/results"] if out else []
    print("\n".join(["== summary", *lines, *where, f"  {'FAILED' if failed else 'all passed'}"]), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(names=sys.argv[1:]))
