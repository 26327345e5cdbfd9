"""What describes a GEMM by cuSPARSELt, and a thread's way to the library: a handle per device, its plans and their workspaces.

The library's handles and plans are not for several threads at once, and autograd runs backward in threads of its own, so each thread has
its own; they end with it. Making a plan takes the host 50 to 200 us.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import capability
from ...pattern import BackendError
from .. import streams

KEPT = 1024
"""Plans that a thread keeps on a device; then it drops all of them and starts anew."""


class Ready(NamedTuple):
    """A plan: its number in the context, the bytes that it needs as workspace, and what it was made for."""

    number: int
    workspace: int
    problem: Problem
    algorithm: Algorithm


class Here:
    """What a thread has on a device."""

    def __init__(self, library: Any, device: int) -> None:
        self.library, self.device = library, device
        self.context = _core().Context(library)
        self._run = self.context.run
        self.plans: dict[tuple[Problem, Algorithm], Ready] = {}
        self.routes: dict[Any, Ready] = {}
        """The plan of each problem whose algorithm is right, and of each kind of call."""
        self.workspaces: dict[int, Tensor] = {}
        self.zero: Tensor | None = None

    def plan(self, problem: Problem, algorithm: Algorithm, like: Tensor) -> Ready:
        """The plan of a problem, made at the first call."""
        found = self.plans.get((problem, algorithm))
        if found is not None:
            return found
        refuse_capture(like)
        if len(self.plans) >= KEPT:
            self.forget()
        transposed, by_token = LAYOUTS[problem.layout]
        if problem.bias and (self.zero is None or self.zero.numel() < problem.rows):
            self.zero = torch.zeros(problem.rows, dtype=torch.float32, device=like.device)
        # an address to make the plan with; each call tells its own
        bias = self.zero.data_ptr() if problem.bias and self.zero is not None else 0
        with failures():
            number = self.context.plan(
                problem.rows, problem.cols, problem.width, CODES[problem.dtype], CODES[problem.out], transposed, by_token,
                bias, ACTIVATIONS[problem.activation], *algorithm,
            )  # fmt: skip
        found = Ready(number, self.context.workspace(number), problem, algorithm)
        self.plans[problem, algorithm] = found
        return found

    def drop(self, ready: Ready) -> None:
        self.plans.pop((ready.problem, ready.algorithm), None)
        self.context.drop(ready.number)

    def forget(self, problem: Problem | None = None) -> None:
        """Drop the plans of a problem, or all."""
        for ready in [ready for ready in self.plans.values() if problem in (None, ready.problem)]:
            self.drop(ready)
        self.routes.clear()

    def workspace(self, size: int, stream: int, like: Tensor) -> Tensor:
        """Bytes that GEMMs on a stream share, one after the other; a captured graph has its own, as it may run beside other work."""
        if capturing(like):
            return like.new_empty(size, dtype=torch.uint8)
        found = self.workspaces.get(stream)
        if found is None or found.numel() < size:
            found = self.workspaces[stream] = like.new_empty(size, dtype=torch.uint8)
        return found

    def run(
        self, ready: Ready, sparse: int, dense: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None, stream: int, alpha: float
    ) -> None:
        """One GEMM; every operand contiguous, at an address that is a multiple of 16."""
        address = out.data_ptr()
        workspace = self.workspace(ready.workspace, stream, dense) if ready.workspace else None  # alive until the launch
        memory = 0 if workspace is None else workspace.data_ptr()
        c, beta = (address, 0.0) if residual is None else (residual.data_ptr(), 1.0)
        b = 0 if bias is None else bias.data_ptr()
        try:
            self._run(ready.number, sparse, dense.data_ptr(), c, address, b, memory, stream, alpha, beta)
        except _core().Failure as error:
            raise BackendError(f"cuSPARSELt: {error}") from None


class _Threads(threading.local):
    def __init__(self) -> None:
        self.here: dict[int, Here] = {}


_threads = _Threads()


def here(device: int) -> Here:
    """What this thread has on a device; the handle is made at the first call."""
    found = _threads.here.get(device)
    if found is None:
        library, reason = capability.opened()
        if library is None:
            raise BackendError(f"cuSPARSELt: {reason}")
        with failures():
            found = _threads.here[device] = Here(library, device)
    return found


def place(x: Tensor) -> tuple[int, int]:
    if x.is_cpu:
        return on_host()
    device = x.get_device()
    return device, torch._C._cuda_getCurrentRawStream(device)


def on_host() -> tuple[int, int]:
    """Where tensors of the CPU are, for a library that works on them as the one of the tests does."""
    return 0, 0


def existing(device: int) -> Here | None:
    return _threads.here.get(device)


def elsewhere(x: Tensor, device: int) -> bool:
    """Whether another device is the current one, which is the one that the library works on."""
    return x.is_cuda and torch._C._cuda_getDevice() != device


def capturing(x: Tensor) -> bool:
    return streams.capturing(x.device)


def refuse_capture(x: Tensor) -> None:
    """Raise while a graph is captured: nothing may be made, timed or checked then."""
    if capturing(x):
        raise BackendError(
            "cuSPARSELt: a CUDA graph is being captured, and there is no plan for this GEMM yet, which can only be made and checked "
            "outside. Run it once before the capture, in the same thread."
        )


class failures(AbstractContextManager[None]):
    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, _core().Failure):
            raise BackendError(f"cuSPARSELt: {error}") from None


@cache
def _core() -> Any:
    return import_module("..._C", __package__).cusparselt


CODES = {
    torch.float32: 0, torch.float16: 2, torch.int8: 3, torch.int32: 10, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29,
}  # fmt: skip
"""The library's code of each dtype, a ``cudaDataType``."""

RESULTS = {
    torch.float16: (torch.float16,),
    torch.bfloat16: (torch.bfloat16,),
    torch.int8: (torch.int32, torch.int8, torch.float16, torch.bfloat16),
    torch.float8_e4m3fn: (torch.bfloat16, torch.float16, torch.float32),
    torch.float8_e5m2: (torch.bfloat16, torch.float16, torch.float32),
}
"""Dtypes of the operands, and those that their GEMM may have, the usual one first."""

ACTIVATIONS = {"": -1, "relu": 0, "gelu": 3}
"""Epilogues that the library knows, by its code of the attribute."""

LAYOUTS = {"nt": (False, True), "nn": (True, True), "tn": (True, False), "tn.packed": (False, False)}
"""Per layout whether the sparse operand is stored transposed, ``(cols, rows)``, and whether the dense one and the result lie by tokens."""


class Problem(NamedTuple):
    """D = f(S B + bias) + residual: S ``(rows, cols)`` is sparse along ``cols``, B ``(cols, width)`` dense.

    Args:
        layout: ``"nt"`` y = x Wᵀ, S = W; ``"nn"`` dx = g W, S = Wᵀ; ``"tn"`` dW = gᵀ x, S = gᵀ;
            ``"tn.packed"`` the same with S stored as gᵀ.
        dtype, out: of the operands and of the result.
        rows, cols, width: the sizes.
        bias: whether one is added, one number per row of D.
        activation: f, a key of ``ACTIVATIONS``.
        residual: whether one is added.
    """

    layout: str
    dtype: torch.dtype
    out: torch.dtype
    rows: int
    cols: int
    width: int
    bias: bool = False
    activation: str = ""
    residual: bool = False

    @property
    def by_token(self) -> bool:
        """Whether B is stored ``(width, cols)`` and D ``(width, rows)``."""
        return LAYOUTS[self.layout][1]

    @property
    def bias_dtype(self) -> torch.dtype:
        """The dtype of the bias: the result's, float32 with int8 operands."""
        return torch.float32 if self.dtype == torch.int8 else self.out

    @property
    def text(self) -> str:
        """The problem in words, without its width."""
        follows = (("bias", self.bias), (self.activation, self.activation), ("residual", self.residual))
        epilogue = "+".join(name for name, there in follows if there)
        names = (str(self.dtype).removeprefix("torch."), str(self.out).removeprefix("torch."))
        return "|".join((self.layout, *names, epilogue or "plain", f"{self.rows}x{self.cols}"))


class Algorithm(NamedTuple):
    """One of the library's ways to do a GEMM: its id, -1 for the library's default; into how many parts the sum is split, and how."""

    id: int = -1
    splits: int = 1
    mode: int = 0

    def __str__(self) -> str:
        name = "the default algorithm" if self.id < 0 else f"algorithm {self.id}"
        how = {0: "", 1: " in one kernel", 2: " in two kernels"}.get(self.mode, f" in mode {self.mode}")
        return f"{name}, sum split in {self.splits}{how}" if self.splits > 1 or self.mode else name


def misfit(dtype: torch.dtype, rows: int, cols: int) -> str:
    """Why a sparse operand of this size is not taken; empty if it is."""
    step = 32 if dtype.itemsize == 1 else 16
    fits = rows and cols and not rows % step and not cols % step
    return "" if fits else f"rows and columns must be multiples of {step}, not ({rows}, {cols})"


def width_step(dtype: torch.dtype) -> int:
    """What the width of the dense operand must be a multiple of."""
    return 16 // dtype.itemsize
