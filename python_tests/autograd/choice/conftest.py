"""A table of each test's own, and a backend that does as it is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import nmkernels as nm
from nmkernels import dispatch
from nmkernels.autograd import choice


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("NMKERNELS_CHOICE", "NMKERNELS_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NMKERNELS_CACHE", str(tmp_path / "cache"))
    choice.forget()
    yield tmp_path / "cache"
    choice.forget()


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A backend of nm_linear that does as it is told by the list: right, wrong, unwritten, unsteady, raises, declines."""
    how: list[str] = ["right"]
    before, runs = dispatch._impls["nm_linear"], []

    def fn(x: Tensor, *args: Any, out: Tensor | None = None) -> Tensor:
        runs.append(0)
        assert how[0] != "declines"
        if how[0] == "raises":
            raise RuntimeError("no shared memory\nand more")
        y = nm.reference.linear(x, *args) if out is None else out
        if how[0] == "unwritten":
            return y
        y.copy_(nm.reference.linear(x, *args))
        if how[0] == "wrong" or (how[0] == "unsteady" and len(runs) % 2):
            y.view(-1)[-1] *= 1 + (1e-3 if how[0] == "wrong" else 2e-7)
        return y

    entry = dispatch.Impl("nm_linear", "mine", fn, lambda *args: (how[0] != "declines", "it is mine"), 1)
    monkeypatch.setitem(dispatch._impls, "nm_linear", [*before, entry])
    yield how
