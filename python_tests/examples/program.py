"""The modules of ``examples/train_gpt`` under the names that the program gives them, and its smallest run that still does everything."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

from python_tests.house.paths import ROOT

sys.path.insert(0, str(ROOT / "examples/train_gpt"))
import model
import parallel
import report
import train

sys.path.pop(0)
__all__ = ["SIZES", "model", "parallel", "report", "run", "text_of", "train"]

SIZES = ["--steps=12", "--batch=2", "--context=16", "--width=32", "--layers=1", "--heads=2", "--log-every=3", "--checkpoint-every=4"]


def text_of(folder: Path) -> Path:
    """A file with 4 kB of lines."""
    (folder / "a.txt").write_bytes(b"".join(b"line %04d of text\n" % i for i in range(220)))
    return folder / "a.txt"


def run(text: Path, out: Path, *words: str, sizes: list[str] = SIZES) -> None:
    """``train.py`` in this process."""
    # the end of a run generates text to measure its speed, which takes longer than the training here
    with mock.patch.multiple(train, SPEED_TOKENS=4, SPEED_ROUNDS=1, SAMPLE_TOKENS=20):
        train.main(["--data", str(text), "--out", str(out), *sizes, *words])
