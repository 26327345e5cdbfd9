"""Which files of this checkout the house rules look at."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nmkernels"
CSRC = ROOT / "csrc"
FOLDERS = ("nmkernels", "bench", "python_tests", "csrc", "cmake")


def python_files(*folders: str) -> list[Path]:
    """Every Python file under ``folders`` of the checkout, in order."""
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


def text_files() -> list[Path]:
    """Every source and document of the checkout: what a release would contain, results of measurements apart."""
    suffixes = {".py", ".md", ".toml", ".txt", ".cmake", ".h", ".hpp", ".cpp", ".cu", ".cuh", ".yaml"}
    inside = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
    beside = [p for p in ROOT.iterdir() if p.is_file() and (p.suffix in suffixes or p.name == "Makefile")]
    return sorted(inside + beside + [ROOT / ".ci" / "run"])
