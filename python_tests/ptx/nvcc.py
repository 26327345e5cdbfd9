"""CUDA C++ to PTX, where nvcc is."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


@lru_cache(16)
def ptx(source: Path, arch: str = "sm_90a", *flags: str) -> str:
    """What nvcc makes of a file."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made.ptx"
        command = [str(NVCC), "-std=c++17", "-O3", f"-I{CSRC}", f"-arch={arch}", *flags, "-ptx", "-o", str(made), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return made.read_text()
