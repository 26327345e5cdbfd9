"""NVIDIA's compute-sanitizer: ``python -m bench.gpu sanitizer`` runs the tests of the CUDA kernels under its memcheck, then its racecheck.

memcheck finds accesses out of bounds and misaligned ones, racecheck hazards in shared memory.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

TOOLS = ("memcheck", "racecheck")
FOUND = 9
MISSING = "compute-sanitizer is not installed: not on PATH and not in the CUDA toolkit (CUDA_HOME, /usr/local/cuda)"
KERNELS = "kns=_kernel"
"""Only kernels whose name contains this: all of this package, few of the vendor's matrix products, whose hazards are not ours."""

TESTS = ("python_tests/backends/cuda",)
CHOSEN = "not graph and not captur and not replay"
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Each tensor is an allocation of its own, which ends where the tensor ends. Graphs cannot be captured without the cache."""

FINDING = r"^========= (?!COMPUTE-SANITIZER|(?:ERROR|RACECHECK) SUMMARY: 0 |Target application returned|.*=$).*"
"""A line of its output that tells of a finding: it is there also where the process was ended before its exit status could tell."""


def find() -> str | None:
    """Where compute-sanitizer is: on PATH, or in the CUDA toolkit."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    inside = [Path(home) / part for home in homes if home for part in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, inside)]))


def command(path: str, tool: str) -> tuple[str, ...]:
    """What goes before a command that is to run under a tool."""
    return path, "--tool", tool, "--error-exitcode", str(FOUND), "--kernel-name", KERNELS
