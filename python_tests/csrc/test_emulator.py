"""The emulator's own tests, compiled without sanitizers; ``make sanitize`` runs them with, and the kernels' too."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
FLAGS = ("-std=c++17", "-O1", "-DNM_EMULATED", "-pthread", "-Wall", "-Wextra", "-Werror")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None or not CSRC.is_dir(), reason="no g++, or no sources")]


@pytest.mark.parametrize("flags", [(), ("-U__ELF__",)], ids=["own way to switch stacks", "portable way"])
def test_the_emulator_follows_cuda(tmp_path: Path, flags: tuple[str, ...]) -> None:
    tests = (CSRC / "tests" / "cuda" / f"test_{name}.cpp" for name in ("emulator", "warps", "ptx", "faults"))
    sources = [CSRC / "tests" / "main.cpp", *tests, *(CSRC / "emulator").glob("*.cpp"), "-x", "c++", CSRC / "cuda" / "queue.cu"]
    for command in (["g++", *FLAGS, *flags, "-o", str(tmp_path / "tests"), *map(str, sources)], [str(tmp_path / "tests")]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failures" in done.stdout
