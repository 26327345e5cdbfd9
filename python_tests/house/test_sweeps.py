"""The tenth of every sweep that runs with NMKERNELS_TENTH, and the one that .ci/run chooses."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from python_tests.conftest import TENTH, pytest_collection_modifyitems, sweeps_left_out
from python_tests.house.paths import ROOT

DIGITS = "0123456789"


@dataclass(frozen=True)
class Case:
    """A collected test, as far as the selection looks at it."""

    nodeid: str
    slow: bool = True

    def get_closest_marker(self, name: str) -> bool:
        return self.slow and name == "slow"


SWEEP = [Case(f"test_a.py::test_every[{i}-x[{i}]]") for i in range(200)]
OTHERS = [
    *(Case(f"test_a.py::test_every[quick {i}]", slow=False) for i in range(40)),
    *(Case(f"test_a.py::test_few[{i}]") for i in range(4)),
    *(Case(f"test_a.py::test_every_other[{i}]", slow=False) for i in range(40)),
    Case("test_a.py::test_alone"),
]


def collected(tenth: str | None, monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """What is left of all cases, in order, after pytest's hook."""
    deselected: list[Case] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    monkeypatch.delenv(TENTH, raising=False) if tenth is None else monkeypatch.setenv(TENTH, tenth)
    items = [*SWEEP, *OTHERS]
    pytest_collection_modifyitems(SimpleNamespace(hook=hook), items)  # type: ignore[arg-type]
    assert [case for case in [*SWEEP, *OTHERS] if case not in deselected] == items
    return items


def test_the_ten_tenths_are_each_case_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [collected(tenth, monkeypatch) for tenth in DIGITS]
    assert sorted(case.nodeid for run in runs for case in run if case in SWEEP) == sorted(case.nodeid for case in SWEEP)
    assert all(10 <= sum(case in SWEEP for case in run) <= 35 for run in runs)
    assert all([case for case in run if case not in SWEEP] == OTHERS for run in runs), "what is quick, or no sweep, always runs"
    assert collected("3", monkeypatch) == runs[3]
    five = [Case(f"test_a.py::test_five[{i}]") for i in range(5)]
    assert sum(len(sweeps_left_out(five, tenth)) for tenth in DIGITS) == 9 * 5, "five slow cases are a sweep"


@pytest.mark.parametrize("tenth", [None, ""])
def test_without_a_tenth_everything_runs(tenth: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert collected(tenth, monkeypatch) == [*SWEEP, *OTHERS]


def test_a_case_never_changes_its_tenth() -> None:
    """Not even from one process to the next, as Python's own hash of a text does."""
    left = [case.nodeid for case in SWEEP[:20] if case.nodeid not in sweeps_left_out(SWEEP, "9")]
    assert left == ["test_a.py::test_every[4-x[4]]", "test_a.py::test_every[8-x[8]]"]


@pytest.mark.parametrize("tenth", ["10", "-1", "all", "³"])
def test_another_value_is_an_error(tenth: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"{TENTH}={tenth} is not a digit"):
        sweeps_left_out(SWEEP, tenth)


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_a_commit_chooses_the_tenth(tmp_path: Path) -> None:
    """That of a commit is its own; outside a repository, and where one is chosen already, there is one too."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "make").write_text(f'#!/bin/sh\necho "$@ ${{{TENTH}-unset}}"\n')
    (tmp_path / "make").chmod(0o755)

    def tenths(**env: str) -> set[str]:
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GIT_CEILING_DIRECTORIES": str(tmp_path.parent), **env}
        done = subprocess.run([tmp_path / ".ci" / "run"], env=env, capture_output=True, text=True, timeout=60, check=True)
        return {line.rpartition(" ")[2] for line in done.stdout.splitlines() if line.startswith(("test", "docs"))}

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        return subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True).stdout.strip()

    assert tenths() <= set(DIGITS) and len(tenths()) == 1
    git("init", "-q")
    seen = set()
    for i in range(8):
        git("commit", "-q", "--allow-empty", "-m", str(i))
        seen |= tenths()
        assert tenths() == {str(int(git("rev-parse", "HEAD")[:8], 16) % 10)}
    assert len(seen) > 1
    assert tenths(**{TENTH: "4"}) == {"4"} and tenths(**{TENTH: ""}) == {""}
