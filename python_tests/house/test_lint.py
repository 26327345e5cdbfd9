"""ruff and mypy are content. ``make test`` runs both itself before the tests and says so in NMKERNELS_LINTED."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from python_tests.house.tree import ROOT

CHECKS = {"ruff": ["ruff", "check", "--quiet"], "format": ["ruff", "format", "--check", "--quiet"], "mypy": ["mypy"]}


def _run(words: list[str], *more: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    if importlib.util.find_spec(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed")
    return subprocess.run([sys.executable, "-m", *words, *more], cwd=cwd, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("NMKERNELS_LINTED") == "1", reason="make test has run ruff and mypy just now")
@pytest.mark.parametrize("check", CHECKS)
def test_clean(check: str) -> None:
    done = _run(CHECKS[check])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("check", "text"), [("ruff", "import os\n"), ("format", "x=1\n"), ("mypy", '"""M."""\n\n\ndef f(x):\n    return x\n')]
)
def test_unclean_is_noticed(tmp_path: Path, check: str, text: str) -> None:
    path = tmp_path / "a.py"
    path.write_text(text)
    assert _run(CHECKS[check], "--config-file" if check == "mypy" else "--config", str(ROOT / "pyproject.toml"), str(path)).returncode == 1
