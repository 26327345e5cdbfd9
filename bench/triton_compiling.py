"""Compiles Triton kernels for an architecture without a GPU.

The kernels that a call would launch are compiled and collected instead of run:

    with recording(90) as kernels:
        mask(torch.empty(4096, 4096, device="meta"), 2, 4)
    kernels[0].asm["ptx"]

The kernels, their constexprs and the divisibility of their arguments are those of the real call; a tensor on the meta device counts as
aligned to 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from nmkernels.backends.triton import launch


class _NoDevice:
    """The part of a driver that compiling needs."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # kernels are cached per device, so each architecture is a device

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextmanager
def compiling(capability: int, use: Callable[[Any, int, tuple[Any, ...]], None]) -> Iterator[None]:
    """Inside, Triton's ``launch`` compiles for compute capability 80, 90, ... and calls ``use(compiled, programs, arguments)``.

    Raises:
        RuntimeError: the kernels were decorated for the interpreter (TRITON_INTERPRET=1) and cannot be compiled.
    """
    if launch.INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET=1 interprets kernels; unset it to compile them.")
    before, active = launch.instead, driver._active
    launch.instead = use
    driver.set_active(_NoDevice(capability))
    try:
        yield
    finally:
        launch.instead = before
        driver._active = active


@contextmanager
def recording(capability: int) -> Iterator[list[Any]]:
    """``compiling``, with the compiled kernels collected in a list."""
    kernels: list[Any] = []
    with compiling(capability, lambda compiled, _programs, _args: kernels.append(compiled)):
        yield kernels
