"""The emulator is there when the suite says so, and is never chosen by itself."""

from __future__ import annotations

import os

import pytest
import torch

import nmkernels as nm
from nmkernels import _dispatch
from nmkernels.backends.cuda import _core

emulated = pytest.mark.skipif(not _core.emulator_built(), reason="the emulator is not built; NMKERNELS_EMULATOR=1 builds it")


@pytest.mark.skipif(os.environ.get("NMKERNELS_EMULATOR", "0") == "0", reason="the emulator is not asked for")
def test_the_emulator_is_built() -> None:
    assert _core.emulator_built()


@emulated
def test_it_is_never_chosen_by_itself() -> None:
    w = torch.randn(4, 8)
    assert _dispatch.implementations("nm_mask")[-1].backend == _core.EMULATED
    assert _dispatch.choose("nm_mask", w, 2, 4).backend != _core.EMULATED


@emulated
def test_it_runs_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(4, 8)
    expected = nm.ops.mask(w, "2:4")
    monkeypatch.setenv("NMKERNELS_BACKEND", _core.EMULATED)
    assert f"{_core.EMULATED} chosen" in nm.explain("nm_mask", w, 2, 4)
    assert torch.equal(nm.ops.mask(w, "2:4"), expected)


def test_the_compiled_kernels_decline_the_cpu() -> None:
    entry = next(i for i in _dispatch.implementations("nm_mask") if i.backend == _core.NAME)
    can, reason = entry.supports(torch.randn(4, 8), 2, 4)
    assert not can and reason
