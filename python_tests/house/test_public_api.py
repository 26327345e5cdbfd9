"""The public API changes only on purpose."""

from __future__ import annotations

import difflib

from python_tests.house.api import FROZEN, public_api

MOST = 220


def test_public_api_is_the_frozen_one() -> None:
    frozen, present = FROZEN.read_text(encoding="utf-8").splitlines(), public_api()
    changes = "\n".join(difflib.unified_diff(frozen, present, FROZEN.name, "the package", lineterm="", n=0))
    assert not changes, (
        f"the public API changed:\n{changes}\nIf that is meant: run `python -m python_tests.house.api`, and tell of it in CHANGELOG.md."
    )
    assert len(present) <= MOST
