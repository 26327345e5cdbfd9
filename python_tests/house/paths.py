"""Paths of this checkout."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nmkernels"
CSRC = ROOT / "csrc"
