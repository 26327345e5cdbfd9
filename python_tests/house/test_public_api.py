"""The public API changes only on purpose."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

import pytest

from python_tests.house.api import FROZEN, public_api

HOW = "If the change is meant: run `python -m python_tests.house.api`, and tell of it in CHANGELOG.md."


def difference(frozen: list[str], present: list[str]) -> str:
    """The unified diff of two lists of names, empty when they agree."""
    return "\n".join(difflib.unified_diff(frozen, present, "public_api.txt", "the package", lineterm="", n=0))


def test_public_api_is_the_frozen_one() -> None:
    changes = difference(FROZEN.read_text(encoding="utf-8").splitlines(), public_api())
    assert not changes, f"the public API changed:\n{changes}\n{HOW}"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "toyapi" / "_hidden").mkdir(parents=True)
    (tmp_path / "toyapi" / "_hidden" / "__init__.py").write_text("__all__ = ['x']\nx = 1\n")
    (tmp_path / "toyapi" / "sub.py").write_text("__all__ = ['f']\ndef f(a, b=2, *, c): ...\n")
    (tmp_path / "toyapi" / "__init__.py").write_text("__all__ = ['A', 'K']\nK = 1\nclass A:\n    def __init__(self, n: int = 3): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [m for m in sys.modules if m.split(".")[0] == "toyapi"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / "toyapi"


def test_names_parameters_and_defaults_are_told(toy: Path) -> None:
    assert public_api("toyapi") == ["class toyapi.A(n=3)", "toyapi.K", "toyapi.sub.f(a, b=2, *, c)"]


def test_changed_default_is_a_change(toy: Path) -> None:
    (toy / "sub.py").write_text("__all__ = ['f']\ndef f(a, b=3, *, c): ...\n")
    changes = difference(["class toyapi.A(n=3)", "toyapi.K", "toyapi.sub.f(a, b=2, *, c)"], public_api("toyapi"))
    assert changes.splitlines()[-2:] == ["-toyapi.sub.f(a, b=2, *, c)", "+toyapi.sub.f(a, b=3, *, c)"]
