"""Imports and includes only go down the layers."""

from __future__ import annotations

from python_tests.house.layers import import_violations, include_violations
from python_tests.house.tree import CSRC, PACKAGE


def test_imports_and_includes_go_down() -> None:
    assert import_violations(PACKAGE) == [] and include_violations(CSRC) == []
