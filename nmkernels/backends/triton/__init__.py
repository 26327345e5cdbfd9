"""The Triton backend: float32, bfloat16 and float16 on every GPU that Triton supports.

Importing this package does not import Triton: each op loads the module of its family at its first call. ``launch`` launches or compiles
kernels; ``groups`` has the shared device functions. There is one portable kernel per op; if the CUDA kernels are built, they take
precedence.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...capability import triton as triton_probe
from ...dispatch import Verdict, impl
from ...reference.adamw import AdamWArgs
from ..adamw import placed, supports_tensors
from ..shared import DENSE, FLOAT64, ORDERED, only_2_4, tensors

NAME = "triton"
PRIORITY = 5
"""Below the compiled backends, so that the interpreter does not take CPU tensors from them."""

DEVICES = ("cuda", "xpu")
"""torch's device types on which Triton runs; ROCm's is also cuda."""


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU instead of compiling them; slow, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on")


def runnable(tensors: Iterable[Tensor]) -> Verdict:
    """Whether Triton is available and supports these tensors' devices and layouts."""
    probe = triton_probe()
    if not probe.ok:
        return False, probe.reason
    allowed = (*DEVICES, "cpu") if interpreted() else DEVICES
    for x in tensors:
        if x.device.type not in allowed:
            why = "it compiles for GPUs" if x.is_cpu else f"it runs on {' and '.join(DEVICES)}"
            return False, f"{why}, and one of these tensors is on {x.device}"
        if x.layout != torch.strided:
            return False, f"it works on strided tensors, and one of these is {x.layout}; call .to_dense()"
    return (True, "interpreted on the CPU") if interpreted() else _COMPILED


_COMPILED = True, "compiled by Triton"


def supports(*args: Any) -> Verdict:
    """Whether an op without list arguments can run a call."""
    plain = True
    for x in args:
        if isinstance(x, Tensor):
            if x.dtype == torch.float64:
                return FLOAT64
            if x.dtype == torch.int32:
                return ORDERED
            plain = plain and x.is_cuda and x.layout == torch.strided
        elif x is torch.float64:
            return FLOAT64
    # called at every op: the rest takes 5 us, mostly for the name of the device type
    return _COMPILED if plain and triton_probe().ok else runnable(tensors(args))


def supports_adamw(*args: Any) -> Verdict:
    """What MaskedAdamW can run."""
    a = AdamWArgs(*args)
    verdict = supports_tensors(a)
    return runnable(placed(a)) if verdict[0] else verdict


def supports_pack(w: Tensor, n: int, m: int, select: str, *rest: Any) -> Verdict:
    """Whether nm_pack can run a call, which depends on its parts."""
    answer = only_2_4(n, m) if select == "transposable" else (True, "")
    return supports(w, *rest) if answer[0] else answer


SUPPORTS: dict[str, Callable[..., Verdict]] = {
    "nm_masked_adamw_": supports_adamw,
    "nm_linear_integers": lambda *args: DENSE if args[5] == 1 else supports(*args),
    "nm_pack": supports_pack,
    "nm_transposable_mask": lambda w, n, m: supports_pack(w, n, m, "transposable"),
}
"""Ops with their own ``supports``."""

FAMILIES = {
    "groups": ("nm_mask", "nm_prune", "nm_soft_threshold", "nm_soft_threshold_scale"),
    "transposable": ("nm_transposable_mask",),
    "compress": ("nm_compress", "nm_decompress", "nm_pack"),
    "adamw": ("nm_masked_adamw_",),
    "mvue": ("nm_mvue", "nm_mvue_compress"),
    "linear": ("nm_linear", "nm_linear_dgrad", "nm_linear_wgrad"),
    "integers": ("nm_quantize_values", "nm_dequantize_values", "nm_linear_integers"),
}
"""Module → its ops; the functions have the ops' names without ``nm_``."""


def _search(op: str, *args: Any, timer: Any = None) -> Any:
    return import_module(".launches", __name__).search(op, *args, timer=timer)


def _register(op: str, family: str) -> None:
    module: Any = None
    search = _search if family == "linear" else None

    @impl(op, backend=NAME, priority=PRIORITY, supports=SUPPORTS.get(op, supports), search=search, compiles=True)
    def run(*args: Any, out: Any = None) -> Any:
        nonlocal module
        if module is None:
            module = import_module(f".{family}", __name__)
        return getattr(module, name)(*args, out=out)

    name = op.removeprefix("nm_")


for _family, _ops in FAMILIES.items():
    for _op in _ops:
        _register(_op, _family)
