"""Bars of the architecture: what no file of a room may do, and how much there is to read, counted by text."""

from __future__ import annotations

import re

import pytest

from python_tests.house.paths import PACKAGE

BARS = {
    "the contract and the engine import nothing for types only": (r"\bTYPE_CHECKING\b", ("recipes", "train")),
    "methods reach a run by its protocol alone": (r"handle\.run\.|run\.masks\.|run\.tensors\.", ("recipes", "prune")),
    "layers know no backend": (r"^from \.+backends\b", ("nn",)),
    "methods and their contract know no engine": (
        r"^from \.+train\.(?!layer_names\b)",
        ("recipes/methods", "recipes/contrib", "recipes/contract.py", "recipes/registry.py", "recipes/compose.py", "recipes/schedule.py"),
    ),
}
"""What may not be found, as a regular expression, and the files and folders where; the ``__init__`` files of packages are left out."""


@pytest.mark.parametrize("bar", BARS)
def test_bar(bar: str) -> None:
    pattern, rooms = BARS[bar]
    places = [PACKAGE / room for room in rooms]
    paths = [path for place in places for path in ([place] if place.suffix else sorted(place.rglob("*.py"))) if path.name != "__init__.py"]
    assert len(paths) >= len(rooms)
    found = [str(path.relative_to(PACKAGE)) for path in paths if re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)]
    assert not found, f"{bar}; but {', '.join(found)}"


SIZES = {"what a method is, and all methods": (("recipes",), 4500), "training": (("train", "nn", "autograd", "optim", "gemm"), 12000)}
"""Lines that one reads to understand it, at most."""


@pytest.mark.parametrize("what", SIZES)
def test_size(what: str) -> None:
    rooms, most = SIZES[what]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for room in rooms for path in (PACKAGE / room).rglob("*.py")) <= most
