"""Access to the CUDA kernels: what they support, registration of ops, device and stream of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module, util
from typing import Any

import torch
from torch import Tensor

from ...capability import cuda_core, cuda_kernels
from ...dispatch import Verdict, impl
from ..shared import FLOAT64, tensors

NAME, PRIORITY = "cuda", 10
EMULATED, NEVER_CHOSEN = "cuda-emulated", -10
"""The emulator runs only if requested by name: the reference, which supports everything, has a higher priority."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
"""The core's code for each dtype; float64 only as a gradient of AdamW."""


@cache
def module_of(emulated: bool) -> Any:
    """The module of kernels, emulated or compiled; ``capability.cuda_core`` says whether the compiled one exists."""
    return import_module("..._emulated", __package__) if emulated else import_module("..._C", __package__).cuda


def core(x: Tensor) -> Any:
    """The module of kernels for a tensor: compiled for a GPU, emulated for the CPU."""
    return module_of(x.is_cpu)


def queue(x: Tensor) -> tuple[int, int]:
    """The last two arguments of every kernel: the device of ``x`` and its current stream."""
    if x.is_cpu:
        return 0, 0
    device = x.get_device()
    return device, torch._C._cuda_getCurrentRawStream(device)


def runnable(args: Iterable[Any], device: str) -> Verdict:
    """Whether all tensors in ``args`` are strided and on that device type."""
    for x in tensors(args):
        if x.device.type != device:
            return False, f"it works on {device.upper()} tensors, and one of these is on {x.device}"
        if x.layout != torch.strided:
            return False, f"it works on strided tensors, and one of these is {x.layout}; call .to_dense()"
    return True, ""


def plain(args: tuple[Any, ...], device: str) -> Verdict:
    usual = device == "cuda"
    for x in args:
        if isinstance(x, Tensor):
            if x.dtype == torch.float64:
                return FLOAT64
            # called at every op, and the name of the device type takes a microsecond
            usual = usual and x.is_cuda and x.layout == torch.strided
        elif x is torch.float64:
            return FLOAT64
    return _YES if usual else runnable(args, device)


_YES = True, ""


def register(
    op: str, supports: Callable[..., Verdict] | None = None, fits: Callable[[tuple[Any, ...], str], Verdict] = plain, backend: str = NAME,
    priority: int = PRIORITY, layout: Callable[[torch.device], str] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # fmt: skip
    """Register a function as this backend's ``op``, on GPUs and, if it is built, in the emulator.

    ``fits(args, device_type)`` checks the tensors first, then ``supports(*args)`` the op's own conditions. ``backend``: register an
    alternative implementation under another name, on GPUs only. ``layout``: see ``dispatch.Impl``.
    """

    def verdict(args: tuple[Any, ...], device: str, on_device: Verdict) -> Verdict:
        answer = fits(args, device) if on_device[0] else on_device
        if answer[0] and supports:
            answer = supports(*args)
        return on_device if answer[0] else answer

    def on_gpu(*args: Any) -> Verdict:
        # of the first tensor's GPU; if it is not on one, the reason is that, or that nothing is built
        first = args[0] if args and isinstance(args[0], Tensor) else next(tensors(args), None)
        return verdict(args, "cuda", cuda_kernels(first.get_device()) if first is not None and first.is_cuda else cuda_core())

    def on_cpu(*args: Any) -> Verdict:
        return verdict(args, "cpu", (True, "emulated, for tests"))

    def take(fn: Callable[..., Any]) -> Callable[..., Any]:
        impl(op, backend=backend, priority=priority, supports=on_gpu, layout=layout)(fn)
        if backend == NAME and emulator_built():
            impl(op, backend=EMULATED, priority=NEVER_CHOSEN, supports=on_cpu)(fn)
        return fn

    return take


@cache
def emulator_built() -> bool:
    return util.find_spec("nmkernels._emulated") is not None
