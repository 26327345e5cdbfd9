"""Launch a kernel. Kernels take their run-time arguments first and constexprs last."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from . import interpreted

INTERPRETED = interpreted()
"""The setting when the kernels were decorated; changing the variable later has no effect."""


def _mend_interpreter() -> None:
    """Let kernels use scalars as loop bounds, and patch ``triton.language`` once per kernel.

    Triton 3.6 converts one-element arrays, which numpy 2.4 rejects, and patches for every function call, which takes half of its time.
    """
    interpreter: Any = import_module("triton.runtime.interpreter")
    language: Any = import_module("triton.language")
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        used = [x for x in self.fn.__globals__.values() if x is language or x is language.core]
        if any(language.core.is_builtin(x.load) for x in used):
            interpreter._patch_lang(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang_tensor, interpreter.InterpretedFunction.__call__ = patch_tensor, call


if INTERPRETED:
    _mend_interpreter()

instead: Callable[[Any, int, tuple[Any, ...]], None] | None = None
"""If set, called with a compiled kernel, its number of programs and its arguments instead of launching it."""


def launch(kernel: Any, programs: int, args: tuple[Any, ...], warps: int = 4, stages: int = 3, **constexprs: Any) -> None:
    """Launch ``programs`` programs of a kernel on the current stream of the first tensor's device.

    Floating-point operations are not contracted unless the constexprs have ``enable_fp_fusion=True``, for GEMMs.
    """
    if programs <= 0:
        return
    if INTERPRETED:
        constexprs.pop("enable_fp_fusion", None)
        kernel[(programs,)](*args, **constexprs)
        return
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False, **constexprs}
    if instead is not None:
        instead(kernel.warmup(*args, grid=(programs,), **options), programs, args)
        return
    with torch.cuda.device_of(next(x for x in args if isinstance(x, Tensor))):
        kernel[(programs,)](*args, **options)


def next_power_of_2(x: int) -> int:
    return 1 << (x - 1).bit_length() if x > 1 else 1


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@lru_cache(maxsize=64)
def _capability_of(device: torch.device) -> int:
    if device.type != "cuda" or torch.version.hip:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def capability(x: Tensor) -> int:
    """The compute capability that a call with ``x`` is planned for: 80, 90, ...; 0 if there is none."""
    if instead is not None:
        return int(driver.active.get_current_target().arch)
    return _capability_of(x.device)
