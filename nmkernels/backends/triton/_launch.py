"""How a kernel is started: compiled once per kind of arguments, then launched without asking Triton's binder again.

A kernel takes its run-time arguments first and its constexprs last, in the order in which ``launch`` is given them. What makes two
calls need different code is what Triton looks at: dtypes, whether an integer is 1 or a multiple of 16, whether it fits in
32 bits, and the constexprs. All of that is in the key of ``_compiled``. A kernel that declares ``do_not_specialize`` declares it, and
a type such as ``tl.int64``, for all of its integers: their values are in no key.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import triton
from torch import Tensor

from . import interpreted

INTERPRETED = interpreted()
"""As it was when the kernels were decorated; changing the variable later changes nothing."""


def _let_tensors_count() -> None:
    """Let interpreted kernels use scalars as bounds of loops: Triton 3.6 converts arrays of one element, which numpy 2.4 refuses."""
    interpreter: Any = import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patch_better(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_better


if INTERPRETED:
    _let_tensors_count()

_MOST_32_BIT = 2**31 - 1
_compiled: dict[tuple[Any, ...], Any] = {}
instead: Callable[[Any, int, tuple[Any, ...]], None] | None = None
"""What ``aot`` has done with a compiled kernel, its programs and its arguments instead of launching it; None while kernels run."""


def launch(kernel: Any, programs: int, args: tuple[Any, ...], warps: int = 4, stages: int = 3, **constexprs: Any) -> None:
    """Start ``programs`` programs of a kernel on the current stream of the first tensor's device; nothing if there are none.

    Floating-point operations are never contracted; pass ``enable_fp_fusion=True`` among the constexprs of a matrix product.
    """
    if programs <= 0:
        return
    if INTERPRETED:
        constexprs.pop("enable_fp_fusion", None)
        kernel[(programs,)](*args, **constexprs)
        return
    device = next(x.device for x in args if isinstance(x, Tensor))
    if instead is not None:
        instead(kernel.warmup(*args, grid=(programs,), **_options(warps, stages, constexprs)), programs, args)
    elif device.type != "cuda" or device.index == torch.cuda.current_device():
        _start(kernel, programs, args, device.index, warps, stages, constexprs)
    else:
        with torch.cuda.device(device):
            _start(kernel, programs, args, device.index, warps, stages, constexprs)


def _options(warps: int, stages: int, constexprs: dict[str, Any]) -> dict[str, Any]:
    return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False, **constexprs}


def _start(kernel: Any, programs: int, args: tuple[Any, ...], device: int, warps: int, stages: int, constexprs: dict[str, Any]) -> None:
    key: list[Any] = [kernel.fn, device, warps, stages, *constexprs.items()]
    addresses, typed = 0, bool(kernel.do_not_specialize)
    for x in args:
        if isinstance(x, Tensor):
            key.append(x.dtype)
            addresses |= x.data_ptr()
        elif isinstance(x, int):
            key.append(0 if typed else -1 if x == 1 else (x & 15 == 0) + 2 * (x > _MOST_32_BIT))
        else:
            key.append(type(x))
    found = _compiled.get(tuple(key)) if addresses & 15 == 0 else None
    if found is not None:
        fusion = "enable_fp_fusion" in constexprs
        found[(programs, 1, 1)](*args, *(v for k, v in constexprs.items() if not fusion or k != "enable_fp_fusion"))
        return
    # an address that is no multiple of 16 needs code of its own, and which one it is Triton tells apart itself
    compiled = kernel[(programs,)](*args, **_options(warps, stages, constexprs))
    if addresses & 15 == 0:
        _compiled[tuple(key)] = compiled


def flagged(flag: Tensor) -> bool:
    """Whether a kernel has set the one element of ``flag``; the host waits for it. False where nothing runs or a graph is captured."""
    if flag.is_meta or (flag.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return bool(flag)


def next_power_of_2(x: int) -> int:
    """The smallest power of two that is at least ``x``."""
    return 1 << (x - 1).bit_length() if x > 1 else 1


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


__all__ = ["INTERPRETED", "cdiv", "flagged", "launch", "next_power_of_2", "triton"]
