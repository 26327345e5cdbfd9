"""The tenth of every sweep that runs with NMKERNELS_TENTH, and the one that .ci/run chooses."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
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


@pytest.fixture
def ci(tmp_path: Path) -> Callable[..., list[str]]:
    """The calls of make that ``.ci/run`` makes in a folder with these few files, each with the tenth; a call with ``FAILS`` fails."""
    for name in (".ci/run", "csrc/a.cpp", "csrc/README.md", "cmake/a.cmake"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one")
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "make").write_text(f'#!/bin/sh\necho "$@ ${{{TENTH}-unset}}"\ntest "$1" != "$FAILS"\n')
    (tmp_path / "make").chmod(0o755)

    def run(**env: str) -> list[str]:
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GIT_CEILING_DIRECTORIES": str(tmp_path.parent), **env}
        done = subprocess.run([tmp_path / ".ci" / "run"], env=env, capture_output=True, text=True, timeout=60)
        assert (done.returncode == 0) == ("FAILS" not in env), done.stderr
        return [line for line in done.stdout.splitlines() if not line.startswith("==")]

    return run


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_a_commit_chooses_the_tenth(tmp_path: Path, ci: Callable[..., list[str]]) -> None:
    """That of a commit is its own; outside a repository, and where one is chosen already, there is one too."""

    def tenths(**env: str) -> set[str]:
        return {line.rpartition(" ")[2] for line in ci(**env)}

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


def test_sanitizers_run_unless_they_have_passed_with_the_same_sources(tmp_path: Path, ci: Callable[..., list[str]]) -> None:
    def sanitized(**env: str) -> bool:
        calls = {line.split()[0] for line in ci(**{TENTH: "4", **env})}
        assert calls >= {"test-all", "wheel"}
        return "sanitize" in calls

    assert sanitized(FAILS="sanitize") and sanitized() and not sanitized()
    (tmp_path / "csrc" / "README.md").write_text("two")
    assert not sanitized() and sanitized(**{TENTH: ""})
    for name in ("csrc/a.cpp", "cmake/a.cmake", "csrc/new.h"):
        (tmp_path / name).write_text("two")
        assert sanitized() and not sanitized(), name
    (tmp_path / "c++").write_text("#!/bin/sh\necho another compiler")
    (tmp_path / "c++").chmod(0o755)
    assert sanitized()
