"""A text to train on."""

from __future__ import annotations

from pathlib import Path

import pytest

from ._text import write_text


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for every test, which leaves it as it is."""
    return write_text(tmp_path_factory.mktemp("text") / "a.txt")
