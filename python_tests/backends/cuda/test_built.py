"""The emulator is there when the suite says so and is never chosen by itself; compiled kernels are, where the driver takes them."""

from __future__ import annotations

import os
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import nmkernels as nm
from nmkernels import dispatch
from nmkernels.backends.cuda import core
from nmkernels.capability import Probe, cuda_kernels
from python_tests.ops.samples import adamw

emulated = pytest.mark.skipif(not core.emulator_built(), reason="the emulator is not built; NMKERNELS_EMULATOR=1 builds it")


@pytest.mark.skipif(os.environ.get("NMKERNELS_EMULATOR", "0") == "0", reason="the emulator is not asked for")
def test_the_emulator_is_built() -> None:
    assert core.emulator_built()


@emulated
def test_runs_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(4, 8)
    assert dispatch.implementations("nm_mask")[-1].backend == core.EMULATED
    assert dispatch.choose("nm_mask", w, 2, 4).backend != core.EMULATED
    expected = nm.ops.mask(w, "2:4")
    monkeypatch.setenv("NMKERNELS_BACKEND", core.EMULATED)
    assert f"{core.EMULATED} chosen" in nm.explain("nm_mask", w, 2, 4)
    assert torch.equal(nm.ops.mask(w, "2:4"), expected)


@pytest.fixture
def on_gpu() -> torch.Tensor:
    """A tensor on GPU 1 that no machine needs to have."""
    with FakeTensorMode():
        return torch.empty(4, 8, device="cuda:1")


OLD = Probe(False, "the driver is too old: driver of CUDA 12.8, kernels of CUDA 13.0; update the driver")


@pytest.mark.parametrize("verdict", [OLD, Probe(True, "they run")], ids=["old driver", "new driver"])
def test_a_driver_without_kernels_falls_back(on_gpu: torch.Tensor, monkeypatch: pytest.MonkeyPatch, verdict: Probe) -> None:
    """Chosen by itself the backend steps aside, asked for by name it raises; the GPU of the tensor is asked, not the current one."""
    monkeypatch.delenv(dispatch.ENV, raising=False)
    monkeypatch.setattr(core, "cuda_kernels", {1: verdict}.__getitem__)
    assert (dispatch.choose("nm_mask", on_gpu, 2, 4).backend == core.NAME) == verdict.ok
    assert (f"declined: {OLD.reason}" in nm.explain("nm_mask", on_gpu, 2, 4)) == (not verdict.ok)
    # ops that take lists
    entry = next(i for i in dispatch.implementations("nm_masked_adamw_") if i.backend == core.NAME)
    args = adamw(shapes=((4, 8),))
    moved = [[on_gpu] if isinstance(a, list) and a else a for a in args]
    assert entry.supports(*moved)[1] == verdict.reason or verdict.ok
    monkeypatch.setenv(dispatch.ENV, core.NAME)
    if not verdict.ok:
        with pytest.raises(nm.BackendError, match=re.escape(OLD.reason) + ".*Unset"):
            dispatch.choose("nm_mask", on_gpu, 2, 4)


def test_no_gpu_is_asked_for_a_tensor_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would start CUDA in a process that may never need it."""
    monkeypatch.setattr(core, "cuda_kernels", lambda _: pytest.fail("a GPU was asked"))
    entry = next(i for i in dispatch.implementations("nm_mask") if i.backend == core.NAME)
    can, reason = entry.supports(torch.randn(4, 8), 2, 4)
    assert not can and reason


@pytest.mark.gpu
def test_the_kernels_run_on_every_gpu_of_this_machine() -> None:
    for device in range(torch.cuda.device_count()):
        assert cuda_kernels(device).ok, cuda_kernels(device).reason
        capability, processors, shared, *clocks = core.core(torch.empty(0, device=device)).gpu(device)
        found = torch.cuda.get_device_properties(device)
        assert (capability, processors) == (10 * found.major + found.minor, found.multi_processor_count)
        assert shared >= 99 << 10 and all(c >= 0 for c in clocks)
