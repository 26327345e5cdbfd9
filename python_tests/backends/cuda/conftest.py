"""Where the CUDA kernels run: emulated on the CPU where that is built (NMKERNELS_EMULATOR=1), and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nmkernels import capability, dispatch
from nmkernels.backends.cuda.core import EMULATED, NAME, emulator_built

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if capability.cuda_device().ok else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """The device of a test's tensors: "cpu" runs the emulator, "cuda" the compiled kernels."""
    if request.param == "cpu" and not emulator_built():
        pytest.skip("the emulator of CUDA kernels is not built; NMKERNELS_EMULATOR=1 python setup.py build_ext --inplace")
    return str(request.param)


@pytest.fixture
def ours(device: str) -> Callable[[str], dispatch.Impl]:
    """``ours("nm_mask")``: this backend's entry for an op, on the device of the test."""
    backend = EMULATED if device == "cpu" else NAME

    def entry(op: str) -> Any:
        return next(i for i in dispatch.implementations(op) if i.backend == backend)

    return entry
