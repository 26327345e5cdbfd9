"""A small text, and the smallest run of ``train`` that still does everything."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from nmkernels import cli
from nmkernels.cli import deploy

SIZES = ["--steps", "12", "--batch", "2", "--context", "16", "--width", "32", "--layers", "1", "--heads", "2", "--log-every", "3"]


def write_text(path: Path) -> Path:
    """4 kB of lines."""
    path.write_bytes(b"".join(b"line %04d of text\n" % i for i in range(220)))
    return path


def train(text: Path, out: Path, *more: str, sizes: list[str] = SIZES) -> int:
    """The exit status of ``python -m nmkernels train`` in this process."""
    # the end of a run generates text to measure its speed, which takes longer than the training here
    with mock.patch.multiple(deploy, SPEED_TOKENS=4, SPEED_ROUNDS=1, SAMPLE_TOKENS=20):
        return cli.main(["train", "--data", str(text), "--out", str(out), *sizes, *more])


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for every test, which leaves it as it is."""
    return write_text(tmp_path_factory.mktemp("text") / "a.txt")
