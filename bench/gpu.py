"""What ``make gpu`` runs: build in place, the tests marked gpu, quick benchmarks, the README's table, and a summary last.

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
    Step("benchmarks", ("-m", "bench.quick", "--device", "cuda")),
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


def results() -> str:
    """The file that the benchmarks write, from the repository's root."""
    import torch

    from .rows import RESULTS, machine, slug

    return str((RESULTS / f"{slug(machine('cuda'))}.csv").relative_to(ROOT)) if torch.cuda.is_available() else ""


def main(lacks: Callable[[], str] = missing, runner: Runner = run, names: Sequence[str] = ()) -> int:
    """Run every step, or those named, also after one that failed, then print the summary."""
    if unknown := set(names) - {step.name for step in STEPS}:
        print(f"make gpu: no step is called {', '.join(sorted(unknown))}; there are {', '.join(step.name for step in STEPS)}")
        return 2
    if reason := lacks():
        print(f"make gpu: no NVIDIA GPU to use here: {reason}")
        return 2
    lines, failed = [], False
    for step in (step for step in STEPS if not names or step.name in names):
        print(f"== {step.name}", flush=True)
        start = time.perf_counter()
        status = runner(list(step.words))
        note = dict(step.fine).get(status, "")
        good = status == 0 or bool(note)
        failed |= not good
        verdict = "ok" if good else f"FAILED, exit status {status}"
        lines.append(f"  {step.name:<12}{time.perf_counter() - start:>7.1f} s  {verdict}{f' ({note})' if note else ''}")
    where = [f"  rows in {path}; commit it with README.md and bench/results" for path in (results(),) if path]
    print("\n".join(["== summary", *lines, *where, f"  {'FAILED' if failed else 'all passed'}"]), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(names=sys.argv[1:]))
