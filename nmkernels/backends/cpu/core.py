"""The compiled core: loading it, what it supports, and registering its ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...capability import compiled_core
from ...dispatch import Verdict, impl
from ...pattern import BackendError
from ..shared import FLOAT64, ORDERED, tensors

NAME, PRIORITY = "cpu", 10
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
"""The core's code for each dtype; float64 only as a gradient of AdamW."""


@cache
def core() -> Any:
    """The extension module, imported at the first call; ``BackendError`` if ``NMKERNELS_ISA`` names an unsupported instruction set."""
    module = import_module("..._C", __package__)
    try:
        module.isa()
    except ValueError as error:
        raise BackendError(f"The CPU kernels cannot run: {error}.") from None
    return module


def runnable(arguments: Iterable[Tensor]) -> Verdict:
    """Whether the core is built and supports the device and layout of these tensors, and why not."""
    for x in arguments:
        if not x.is_cpu:
            return False, f"it works on CPU tensors, and one of these is on {x.device}"
        if x.layout != torch.strided:
            return False, f"it works on strided tensors, and one of these is {x.layout}; call .to_dense()"
    built = compiled_core()  # last, so that this is the reason only if the core would run the call
    return (True, "compiled for the CPU") if built.ok else (False, built.reason)


def supports(*args: Any) -> Verdict:
    """The ``supports`` of every op but AdamW."""
    arguments = list(tensors(args))
    for x in arguments:
        if x.dtype == torch.float64:
            return FLOAT64
        if x.dtype == torch.int32:
            return ORDERED
    return runnable(arguments)


def register(op: str, supports: Callable[..., Verdict] = supports) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as this backend's ``op``."""
    return impl(op, backend=NAME, priority=PRIORITY, supports=supports)
