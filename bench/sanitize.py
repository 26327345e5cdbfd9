"""The CUDA kernels under NVIDIA's compute-sanitizer: ``python -m bench.sanitize`` runs their tests with memcheck, then with racecheck.

memcheck finds accesses out of bounds and misaligned ones, racecheck hazards in shared memory. Exit status 0: nothing was found,
1: something was found or a test failed, 4: compute-sanitizer is not installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck")
FOUND, NOT_INSTALLED = 9, 4
KERNELS = "kns=_kernel"
"""Only kernels whose name contains this: all of this package, few of the vendor's matrix products, whose hazards are not ours."""
TESTS = (
    "-m",
    "pytest",
    "-m",
    "gpu",
    "-k",
    "not graph and not captur and not replay",
    "-q",
    "-p",
    "no:cacheprovider",
    "python_tests/backends/cuda",
)
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Each tensor is an allocation of its own, which ends where the tensor ends. Graphs cannot be captured without the cache."""
Runner = Callable[[list[str]], int]


def find() -> str | None:
    """Where compute-sanitizer is: on PATH, or in the CUDA toolkit."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    inside = [Path(home) / part for home in homes if home for part in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, inside)]))


def command(path: str, tool: str) -> list[str]:
    """The tests under one tool."""
    return [path, "--tool", tool, "--error-exitcode", str(FOUND), "--kernel-name", KERNELS, sys.executable, *TESTS]


def run(words: list[str]) -> int:
    """Run ``words`` at the repository's root; the exit status."""
    return subprocess.run(words, cwd=ROOT, env={**os.environ, **ENVIRONMENT}).returncode


def main(finder: Callable[[], str | None] = find, runner: Runner = run) -> int:
    """Every tool, also after one that found something."""
    path = finder()
    if path is None:
        print("compute-sanitizer is not installed: not on PATH and not in the CUDA toolkit (CUDA_HOME, /usr/local/cuda)")
        return NOT_INSTALLED
    failed = []
    for tool in TOOLS:
        print(f"-- {tool}", flush=True)
        status = runner(command(path, tool))
        if status:
            failed.append(f"{tool}: {'something was found' if status == FOUND else f'the tests failed, exit status {status}'}")
    print("\n".join(failed or ["nothing found"]))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
