"""Where things are in this checkout."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nmkernels"
CSRC = ROOT / "csrc"


def python_files(*folders: str) -> list[Path]:
    """Every Python file under ``folders`` of the checkout, in order."""
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))
