"""How kernels are launched: the arguments of Triton, the device, and when nothing can be launched."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("triton")

from torch._subclasses.fake_tensor import FakeTensorMode

from nmkernels import explain
from nmkernels.backends import triton as backend
from nmkernels.backends.triton import launch as launching
from nmkernels.capability import Probe
from nmkernels.dispatch import choose


def test_gpu_calls_are_declined_without_a_launcher(monkeypatch):
    """As in an image without a C compiler: the next backend runs it, and the reason is reported."""
    with FakeTensorMode():
        w = torch.empty(4, 8, device="cuda")
    assert backend.supports(w, 2, 4) == (True, "compiled by Triton")
    monkeypatch.setattr(backend, "triton_probe", lambda: Probe(False, "Failed to find C compiler"))
    assert backend.supports(w, 2, 4) == (False, "Failed to find C compiler")
    assert "declined: Failed to find C compiler" in explain("nm_mask", w, 2, 4)
    assert choose("nm_mask", w, 2, 4).backend == "reference"


def test_arguments_of_triton(monkeypatch):
    """On the device of the first tensor; contraction is off unless asked for, and no programs are nothing."""
    monkeypatch.setattr(launching, "INTERPRETED", False)
    kernel, started, x, asked = MagicMock(), [], torch.zeros(256), []
    kernel.__getitem__.side_effect = lambda grid: lambda *args, **options: started.append((grid, args, options))
    real = torch.cuda.device_of
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: asked.append(x) or real(x))
    launching.launch(kernel, 5, (None, x, 7), warps=2, stages=1, N=2, enable_fp_fusion=True)
    launching.launch(kernel, 6, (x,), TILE=64)
    launching.launch(kernel, 0, (x,), TILE=64)
    assert started == [
        ((5,), (None, x, 7), {"num_warps": 2, "num_stages": 1, "enable_fp_fusion": True, "N": 2}),
        ((6,), (x,), {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False, "TILE": 64}),
    ]
    assert len(asked) == 2 and all(one is x for one in asked)
