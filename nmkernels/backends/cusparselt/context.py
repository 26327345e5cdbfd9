"""Problems and algorithms of cuSPARSELt, and a thread's session with the library: per device a handle, plans and workspaces.

The library's handles and plans must not be shared by threads, and autograd runs backward in its own threads, so each thread has its own
session, which ends with it. Making a plan takes the host 50 to 200 us.
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

MOST_PLANS = 1024
"""Size of a session's cache of plans; when full it is cleared."""


class Plan(NamedTuple):
    """A plan: its number in the context, the bytes of workspace that it needs, and the problem and algorithm that it is for."""

    number: int
    workspace: int
    problem: Matmul
    algorithm: Algorithm


class Session:
    """A thread's handle, plans and workspaces on one device."""

    def __init__(self, library: Any, device: int) -> None:
        self.library, self.device = library, device
        self.context = _core().Context(library)
        self._run = self.context.run
        self.plans: dict[tuple[Matmul, Algorithm], Plan] = {}
        self.routes: dict[Any, Plan] = {}
        """The plan of each problem whose algorithm was checked, and of each kind of call."""
        self.workspaces: dict[int, Tensor] = {}
        self.zero: Tensor | None = None

    def plan(self, problem: Matmul, algorithm: Algorithm, like: Tensor) -> Plan:
        """The plan of a problem and algorithm, cached."""
        plan = self.plans.get((problem, algorithm))
        if plan is not None:
            return plan
        refuse_capture(like)
        if len(self.plans) >= MOST_PLANS:
            self.forget()
        transposed, by_token = LAYOUTS[problem.layout]
        if problem.bias and (self.zero is None or self.zero.numel() < problem.rows):
            self.zero = torch.zeros(problem.rows, dtype=torch.float32, device=like.device)
        # an address for making the plan; each call passes its own
        bias = self.zero.data_ptr() if problem.bias and self.zero is not None else 0
        with failures():
            number = self.context.plan(
                problem.rows, problem.cols, problem.width, CODES[problem.dtype], CODES[problem.out], transposed, by_token,
                bias, ACTIVATIONS[problem.activation], *algorithm,
            )  # fmt: skip
        plan = Plan(number, self.context.workspace(number), problem, algorithm)
        self.plans[problem, algorithm] = plan
        return plan

    def drop(self, plan: Plan) -> None:
        """Destroy a plan."""
        self.plans.pop((plan.problem, plan.algorithm), None)
        self.context.drop(plan.number)

    def forget(self, problem: Matmul | None = None) -> None:
        """Destroy the plans of a problem, or all plans."""
        for plan in [plan for plan in self.plans.values() if problem in (None, plan.problem)]:
            self.drop(plan)
        self.routes.clear()

    def workspace(self, size: int, stream: int, like: Tensor) -> Tensor:
        """Workspace shared by all GEMMs on a stream; a captured graph gets its own, since it may run concurrently with other work."""
        if capturing(like):
            return like.new_empty(size, dtype=torch.uint8)
        workspace = self.workspaces.get(stream)
        if workspace is None or workspace.numel() < size:
            workspace = self.workspaces[stream] = like.new_empty(size, dtype=torch.uint8)
        return workspace

    def run(
        self, plan: Plan, sparse: int, dense: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None, stream: int, alpha: float
    ) -> None:
        """Run one GEMM; operands must be contiguous, at addresses that are multiples of 16."""
        address = out.data_ptr()
        workspace = self.workspace(plan.workspace, stream, dense) if plan.workspace else None  # alive until the launch
        memory = 0 if workspace is None else workspace.data_ptr()
        c, beta = (address, 0.0) if residual is None else (residual.data_ptr(), 1.0)
        b = 0 if bias is None else bias.data_ptr()
        try:
            self._run(plan.number, sparse, dense.data_ptr(), c, address, b, memory, stream, alpha, beta)
        except _core().Failure as error:
            raise BackendError(f"cuSPARSELt: {error}") from None


class _Threads(threading.local):
    def __init__(self) -> None:
        self.sessions: dict[int, Session] = {}


_threads = _Threads()


def session_on(device: int) -> Session:
    """This thread's session on a device, created at the first call."""
    session = _threads.sessions.get(device)
    if session is None:
        library, reason = capability.opened()
        if library is None:
            raise BackendError(f"cuSPARSELt: {reason}")
        with failures():
            session = _threads.sessions[device] = Session(library, device)
    return session


def device_and_stream(x: Tensor) -> tuple[int, int]:
    """The index of x's device and its current stream; ``on_host`` for CPU tensors."""
    if x.is_cpu:
        return on_host()
    device = x.get_device()
    return device, torch._C._cuda_getCurrentRawStream(device)


def on_host() -> tuple[int, int]:
    """Device and stream of CPU tensors, for a library that works on the CPU, as the one in the tests does."""
    return 0, 0


def existing(device: int) -> Session | None:
    """This thread's session on a device if there is one."""
    return _threads.sessions.get(device)


def on_other_device(x: Tensor, device: int) -> bool:
    """Whether ``device`` is not the current device, on which the library works."""
    return x.is_cuda and torch._C._cuda_getDevice() != device


def capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured on x's device."""
    return streams.capturing(x.device)


def refuse_capture(x: Tensor) -> None:
    """Raise during graph capture, when plans cannot be made, timed or checked."""
    if capturing(x):
        raise BackendError(
            "cuSPARSELt: a CUDA graph is being captured, and there is no plan for this GEMM yet, which can only be made and checked "
            "outside. Run it once before the capture, in the same thread."
        )


class failures(AbstractContextManager[None]):
    """Raise errors of the library as ``BackendError``."""

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
"""Dtype of the operands → possible dtypes of the result, the default first."""

ACTIVATIONS = {"": -1, "relu": 0, "gelu": 3}
"""The activations that the library supports → its code."""

LAYOUTS = {"nt": (False, True), "nn": (True, True), "tn": (True, False), "tn.packed": (False, False)}
"""Layout → whether the sparse operand is stored transposed ``(cols, rows)``; whether dense operand and result are ``(tokens, ...)``."""


class Matmul(NamedTuple):
    """D = f(S B + bias) + residual: S ``(rows, cols)`` is sparse along ``cols``, B ``(cols, width)`` dense.

    Args:
        layout: ``"nt"`` y = x Wᵀ, S = W; ``"nn"`` dx = g W, S = Wᵀ; ``"tn"`` dW = gᵀ x, S = gᵀ;
            ``"tn.packed"`` the same with S stored as gᵀ.
        dtype, out: of the operands and of the result.
        rows, cols, width: the sizes.
        bias: whether a bias is added, one number per row of D.
        activation: f, a key of ``ACTIVATIONS``.
        residual: whether a residual is added.
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
        """The problem as text, without its width."""
        follows = (("bias", self.bias), (self.activation, self.activation), ("residual", self.residual))
        epilogue = "+".join(name for name, there in follows if there)
        names = (str(self.dtype).removeprefix("torch."), str(self.out).removeprefix("torch."))
        return "|".join((self.layout, *names, epilogue or "plain", f"{self.rows}x{self.cols}"))


class Algorithm(NamedTuple):
    """An algorithm of the library: its id (-1 for the default), the number of parts the sum is split into, and the mode of the split."""

    id: int = -1
    splits: int = 1
    mode: int = 0

    def __str__(self) -> str:
        name = "the default algorithm" if self.id < 0 else f"algorithm {self.id}"
        how = {0: "", 1: " in one kernel", 2: " in two kernels"}.get(self.mode, f" in mode {self.mode}")
        return f"{name}, sum split in {self.splits}{how}" if self.splits > 1 or self.mode else name


def misfit(dtype: torch.dtype, rows: int, cols: int) -> str:
    """Why a sparse operand of this size is unsupported; empty if it is supported."""
    step = 32 if dtype.itemsize == 1 else 16
    fits = rows and cols and not rows % step and not cols % step
    return "" if fits else f"rows and columns must be multiples of {step}, not ({rows}, {cols})"


def width_step(dtype: torch.dtype) -> int:
    """The number that must divide the width of the dense operand."""
    return 16 // dtype.itemsize
