"""How a kernel is started: compiled once per kind of arguments, then launched without asking Triton's binder again.

A kernel takes its run-time arguments first and its constexprs last, in the order in which ``launch`` is given them. What makes two
calls need different code is what Triton looks at. For NVIDIA GPUs that is dtypes, whether an address is a multiple of 16, whether an
integer is 1, a multiple of 16, or too wide for 32 bits, and the constexprs; all of it is in the key of ``_started``. A kernel that declares
``do_not_specialize`` declares it, and a type such as ``tl.int64``, for all of its integers: their values are in no key. For other GPUs
Triton looks at more, on AMD's at the size of a tensor's storage, and every launch goes through Triton.

Without a GPU, what a call would launch is compiled for a named architecture and collected instead of run:

    with recording(90) as kernels:
        mask(torch.empty(4096, 4096, device="meta"), 2, 4)
    kernels[0].asm["ptx"]

The kernels, their constexprs and the divisibility of their arguments are those of the real call: a tensor on the meta device counts as
one whose address is a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

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


def _patch_language_once() -> None:
    """Replace ``triton.language`` once per interpreted kernel: Triton 3.6 does it for every function called, half of all its time."""
    interpreter: Any = import_module("triton.runtime.interpreter")
    language: Any = import_module("triton.language")

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        used = [x for x in self.fn.__globals__.values() if x is language or x is language.core]
        if any(language.core.is_builtin(x.load) for x in used):
            interpreter._patch_lang(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call


if INTERPRETED:
    _let_tensors_count()
    _patch_language_once()

_WIDE = 2**31
_PLAIN = frozenset((type(None), bool, float))
"""Arguments of which only the type makes a difference."""

Start = Callable[[int, int, tuple[Any, ...]], None]
"""Starts programs on a device with the run-time arguments."""

_started: dict[tuple[Any, ...], Start] = {}
instead: Callable[[Any, int, tuple[Any, ...]], None] | None = None
"""What ``compiling`` has done with a compiled kernel, its programs and its arguments instead of launching it; None while kernels run."""


def launch(kernel: Any, programs: int, args: tuple[Any, ...], warps: int = 4, stages: int = 3, **constexprs: Any) -> None:
    """Start ``programs`` programs of a kernel on the current stream of the first tensor's device; nothing if there are none.

    Floating-point operations are never contracted; pass ``enable_fp_fusion=True`` among the constexprs of a GEMM.
    """
    if programs <= 0:
        return
    if INTERPRETED:
        constexprs.pop("enable_fp_fusion", None)
        kernel[(programs,)](*args, **constexprs)
        return
    if instead is not None:
        instead(kernel.warmup(*args, grid=(programs,), **_options(warps, stages, constexprs)), programs, args)
        return
    first = args[0] if type(args[0]) is Tensor else next(x for x in args if isinstance(x, Tensor))
    device = first.get_device()
    if first.is_cuda and device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            _start(kernel, programs, args, device, warps, stages, constexprs)
    else:
        _start(kernel, programs, args, device, warps, stages, constexprs)


def _options(warps: int, stages: int, constexprs: dict[str, Any]) -> dict[str, Any]:
    return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False, **constexprs}


def _start(kernel: Any, programs: int, args: tuple[Any, ...], device: int, warps: int, stages: int, constexprs: dict[str, Any]) -> None:
    key = [kernel.fn, device, warps, stages, *constexprs, *constexprs.values()]
    typed = kernel.do_not_specialize
    for x in args:
        kind = type(x)
        if kind is Tensor:
            key.append(x.dtype)
            key.append(x.data_ptr() & 15 == 0)
        elif kind is int:
            if typed:
                key.append(0)
            elif -_WIDE <= x < _WIDE:
                key.append(-1 if x == 1 else x & 15 == 0)
            else:
                key.append((x & 15 == 0) + (4 if x >= _WIDE**2 * 2 else 2))
        elif kind in _PLAIN:
            key.append(kind)
        else:  # a Parameter, or something else with memory
            key += (x.dtype, x.data_ptr() & 15 == 0)
    found = _started.get(tuple(key))
    if found is not None:
        found(programs, device, args)
        return
    compiled = kernel[(programs,)](*args, **_options(warps, stages, constexprs))
    if compiled.metadata.target.backend != "cuda":
        return  # its compiler looks at more than the key has
    _started[tuple(key)] = _starter(compiled, tuple(v for k, v in constexprs.items() if k != "enable_fp_fusion"))


def _starter(compiled: Any, constants: tuple[Any, ...]) -> Start:
    """What ``compiled[(programs, 1, 1)](*args, *constants)`` does, looked up beforehand."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    stream_of, hooks = driver.active.get_current_stream, triton.knobs.runtime

    def start(programs: int, device: int, args: tuple[Any, ...]) -> None:
        # a profiler wants to be told; it adds itself to a chain, or puts a function in its place
        if getattr(hooks.launch_enter_hook, "calls", True) or getattr(hooks.launch_exit_hook, "calls", True):
            compiled[(programs, 1, 1)](*args, *constants)
        else:
            run(programs, 1, 1, stream_of(device), function, metadata, None, None, None, *args, *constants)

    return start


def flagged(flag: Tensor) -> bool:
    """Whether a kernel has set the one element of ``flag``; the host waits for it. False where nothing runs or a graph is captured."""
    if flag.is_meta or (flag.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return bool(flag)


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
    """The compute capability that a call with ``x`` is planned for: 80, 90, ...; 0 where there is no such thing."""
    if instead is not None:
        return int(driver.active.get_current_target().arch)
    return _capability_of(x.device)


class _NoDevice:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # kernels are cached per device: each architecture is one of its own

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextmanager
def compiling(capability: int, use: Callable[[Any, int, tuple[Any, ...]], None]) -> Iterator[None]:
    """Inside, ``launch`` compiles for compute capability 80, 90, ... and calls ``use(compiled, programs, arguments)``.

    Raises:
        RuntimeError: the kernels were decorated for the interpreter (TRITON_INTERPRET=1), which compiles nothing.
    """
    global instead
    if INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET=1 interprets kernels; unset it to compile them.")
    before, active = instead, driver._active
    instead = use
    driver.set_active(_NoDevice(capability))
    try:
        yield
    finally:
        instead = before
        driver._active = active


@contextmanager
def recording(capability: int) -> Iterator[list[Any]]:
    """``compiling``, with the compiled kernels collected in a list."""
    kernels: list[Any] = []
    with compiling(capability, lambda compiled, _programs, _args: kernels.append(compiled)):
        yield kernels
