"""Everything public says what it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from python_tests.house.texts import docstring_violations
from python_tests.house.tree import ROOT, python_files


def test_public_names_are_documented() -> None:
    assert docstring_violations(python_files("nmkernels", "bench"), ROOT) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = 1", "a.py: the module has no docstring"),
        ('"""M."""\ndef f(): ...', "a.py:2: f has no docstring"),
        ('"""M."""\nclass A:\n    x = 1', "a.py:2: A has no docstring"),
        ('"""M."""\nclass A:\n    """A."""\n    def f(self): ...', "a.py:4: A.f has no docstring"),
        ('"""M."""\nclass A:\n    """A."""\n    @property\n    def f(self): ...', "a.py:5: A.f has no docstring"),
    ],
)
def test_missing_docstring_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "a.py").write_text(text)
    assert docstring_violations([tmp_path / "a.py"], tmp_path) == [complaint]


def test_private_names_need_none(tmp_path: Path) -> None:
    text = '"""M."""\ndef _f(): ...\nclass _A:\n    def f(self): ...\nclass B:\n    """B."""\n    def __init__(self): ...'
    (tmp_path / "a.py").write_text(text)
    assert docstring_violations([tmp_path / "a.py"], tmp_path) == []
