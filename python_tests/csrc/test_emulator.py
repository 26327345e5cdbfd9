"""The emulator's own tests, compiled without sanitizers; ``make sanitize`` runs them with, and the kernels' too."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
TESTS = ("emulator", "warps", "ptx", "faults")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None or not CSRC.is_dir(), reason="no g++, or not a source checkout")


def _run(folder: Path, *flags: str) -> str:
    sources = [
        CSRC / "tests" / "main.cpp",
        *(CSRC / "tests" / "cuda" / f"test_{name}.cpp" for name in TESTS),
        *(CSRC / "emulator").glob("*.cpp"),
    ]
    program = folder / "tests"
    command = [
        "g++",
        "-std=c++17",
        "-O1",
        "-DNM_EMULATED",
        "-pthread",
        "-Wall",
        "-Wextra",
        "-Werror",
        *flags,
        *map(str, sources),
        "-o",
        str(program),
    ]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_emulator_does_what_cuda_says(tmp_path: Path) -> None:
    assert "0 failures" in _run(tmp_path)


def test_the_way_to_switch_stacks_elsewhere_works_too(tmp_path: Path) -> None:
    assert "0 failures" in _run(tmp_path, "-U__ELF__")
