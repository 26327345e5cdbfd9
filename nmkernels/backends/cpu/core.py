"""The way into the compiled core: what it can run, and the registration of an op."""

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
from ..shared import ORDERED, tensors

NAME, PRIORITY = "cpu", 10
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
"""The core's code of each dtype; float64 only as gradient or output of AdamW."""


@cache
def core() -> Any:
    """The extension module, imported by the first call that needs it; BackendError where NMKERNELS_ISA cannot be followed."""
    module = import_module("..._C", __package__)
    try:
        module.isa()
    except ValueError as error:
        raise BackendError(f"The CPU kernels cannot run as asked: {error}.") from None
    return module


def runnable(given: Iterable[Tensor]) -> Verdict:
    """Whether the core is there and can take memory like this."""
    for x in given:
        if not x.is_cpu:
            return False, f"it works on CPU tensors, and one of these is on {x.device}"
        if x.layout != torch.strided:
            return False, f"it works on strided tensors, and one of these is {x.layout}; call .to_dense()"
    built = compiled_core()  # last: where this is the reason, the core would run the call
    return (True, "compiled for the CPU") if built.ok else (False, built.reason)


def supports(*args: Any) -> Verdict:
    """What every op but AdamW can run."""
    given = list(tensors(args))
    for x in given:
        if x.dtype == torch.float64:
            return False, "it computes in float32, and this call is in float64"
        if x.dtype == torch.int32:
            return ORDERED
    return runnable(given)


def register(op: str, supports: Callable[..., Verdict] = supports) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as this backend's ``op``."""
    return impl(op, backend=NAME, priority=PRIORITY, supports=supports)


def row_count(x: Tensor, cols: int) -> int:
    """Rows of ``x`` seen as a matrix of so many columns."""
    return x.numel() // cols if cols else 0
