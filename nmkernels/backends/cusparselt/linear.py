"""nm_linear and nm_linear_wgrad by cuSPARSELt, for weights of any pattern that is also 2:4.

The library fuses what it computes as we do: a bias, ReLU, a residual without an activation, and GELU if it uses the error function and not
tanh. NVIDIA does not document that, so it is tested once: the two differ by up to 0.0005, as much as fp16 rounds at 1. torch does the rest
afterwards, on the rounded result.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import capability
from ...capability import compute_capability
from ...dispatch import Verdict, impl
from ...pattern import BackendError
from ...reference.linear import ACTIVATIONS
from ...timing import Measurement, Seconds
from ..shared import aligned
from .algorithms import DEFAULT, checked_algorithm, plan_for, search_gemm
from .blobs import blob_of, compress_as, expanded
from .context import Matmul, Plan, Session, capturing, device_and_stream, existing, misfit, on_other_device, session_on, width_step

_GELU: dict[tuple[int, int, torch.dtype], bool] = {}


def by_erf(dtype: torch.dtype, session: Session, like: Tensor, stream: int) -> bool:
    """Whether the library's GELU is y·Φ(y) up to rounding in a dtype; tested once, outside of graph capture.

    The test multiplies by the identity: at -3 the two GELUs differ by a tenth of their value, while rounding errs by at most 1/256.
    """
    key, size = (session.library.version, session.device, dtype), 32
    if key in _GELU or capturing(like):
        return _GELU.get(key, False)
    problem = Matmul("nt", dtype, dtype, size, size, size, activation="gelu")
    with torch.no_grad():
        y = torch.linspace(-3, 3, size * size, dtype=torch.float32, device=like.device).to(dtype).reshape(size, size)
        out, exact = torch.full_like(y, torch.nan), F.gelu(y.double())
        try:
            plan = session.plan(problem, DEFAULT, like)
            blob = compress_as("nt", torch.eye(size, dtype=dtype, device=like.device), session, stream)
            session.run(plan, blob.data.data_ptr(), y, out, None, None, stream, 1.0)
        except BackendError:
            pass  # out is still NaN, which fails the comparison
        near = (out.double() - exact).abs() <= 2 * torch.finfo(dtype).eps * exact.abs() + 1e-6
        matches = _GELU[key] = bool(near.all())
    return matches


NAME, PRIORITY = "cusparselt", 3
"""Below the package's own kernels; the tuner calls it by name where it was measured to be faster."""

AFTER = {"relu": "square", "gelu": ""}
"""The library's activation → what remains to be applied."""


def problem_of(op: str, *args: Any, erf: bool = True) -> list[Matmul]:
    """The GEMMs that can run a raw op's call, the most fused one first; ``erf``: whether the library's GELU may be used."""
    if op == "nm_linear_wgrad":
        values, _, _, _, cols, x, *_ = args
        return [Matmul("tn.packed", x.dtype, x.dtype, values.shape[0], cols, x.shape[1])]
    if op != "nm_linear":
        raise BackendError(f"{op}: cuSPARSELt supports only nm_linear and nm_linear_wgrad.")
    options: tuple[Any, ...] = (None, "", None)
    x, values, _, _, _, cols, bias, activation, residual = (*args, *options[len(args) - 6 :])
    width, step = x.numel() // cols, width_step(x.dtype)
    b, c = bias is not None, residual is not None and not activation
    theirs = {"relu2": "relu", "gelu": "gelu" if erf else ""}.get(activation, "")
    fused = dict.fromkeys([(b, theirs, c), (b, "", c), (b, "", False), (False, "", False)])
    return [Matmul("nt", x.dtype, x.dtype, values.shape[0], cols, width + -width % step, *also) for also in fused]


def _kind(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = "",
    residual: Tensor | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The key of calls of nm_linear that share a plan."""
    return x.dtype, values.shape[0], cols, x.numel() // cols if cols else 0, bias is None, activation, residual is None


def _most_fused(session: Session, call: tuple[Any, ...], stream: int) -> Plan:
    """The plan for a call of nm_linear that fuses the most."""
    reasons: list[str] = []
    x, activation = call[0], call[7]
    erf = activation == "gelu" and by_erf(x.dtype, session, x, stream)
    for problem in problem_of("nm_linear", *call, erf=erf):
        try:
            return plan_for(problem, session, x, stream)
        except BackendError as error:
            if capturing(x):
                raise
            reasons.append(str(error))
    raise BackendError(reasons[-1])


def _written(out: Tensor | None, like: Tensor, *shape: int) -> Tensor:
    """The tensor that the library writes to: ``out`` if that is contiguous and aligned, else a new one."""
    return like.new_empty(shape) if out is None or not out.is_contiguous() or out.data_ptr() & 15 else out


def linear(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = "",
    residual: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    call = x, values, indices, n, m, cols, bias, activation, residual
    rows, tokens, leading = values.shape[0], x.numel() // cols, x.shape[:-1]
    if not tokens:
        return x.new_empty(*leading, rows) if out is None else out
    device, stream = device_and_stream(x)
    if on_other_device(x, device):
        with torch.cuda.device(device):
            return linear(*call, out)
    session = session_on(device)
    kind = _kind(*call)
    plan = session.routes.get(kind)
    if plan is None:
        plan = session.routes[kind] = _most_fused(session, call, stream)
    problem, pad = plan.problem, plan.problem.width - tokens
    blob = blob_of(values, indices, (n, m, cols), session, stream)
    x = aligned(x)
    if pad:
        x = F.pad(x.reshape(tokens, cols), (0, 0, 0, pad))
        y = x.new_empty(tokens + pad, rows)
    else:
        y = _written(out, x, *leading, rows)
    b = aligned(bias) if bias is not None and problem.bias else None
    r = None
    if residual is not None and problem.residual:
        r = aligned(F.pad(residual.reshape(tokens, rows), (0, 0, 0, pad)) if pad else residual)
    session.run(plan, blob.data.data_ptr(), x, y, b, r, stream, 1.0)
    if pad:
        y = y[:tokens].view(*leading, rows)
    if bias is not None and not problem.bias:
        y.add_(bias)
    after = AFTER.get(problem.activation, activation)
    if after:
        y = y.square() if after == "square" else ACTIVATIONS[after](y)
    if residual is not None and not problem.residual:
        y.add_(residual)
    return y if out is None or y is out else out.copy_(y)


def linear_wgrad(
    values: Tensor, indices: Tensor, n: int, m: int, cols: int, x: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """``nm_linear_wgrad``. A gradient is multiplied once, so its blob is not cached."""
    device, stream = device_and_stream(x)
    if on_other_device(x, device):
        with torch.cuda.device(device):
            return linear_wgrad(values, indices, n, m, cols, x, out_dtype, out)
    session = session_on(device)
    (problem,) = problem_of("nm_linear_wgrad", values, indices, n, m, cols, x)
    plan = plan_for(problem, session, x, stream)
    blob = compress_as(problem.layout, expanded(values, indices, (n, m, cols)), session, stream)
    dw = _written(out, x, problem.rows, problem.width)
    session.run(plan, blob.data.data_ptr(), aligned(x), dw, None, None, stream, 1.0)
    return dw if out is None or dw is out else out.copy_(dw)


# ---- what it supports


def _fits(x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, *others: Any) -> Verdict:
    if x.is_cpu and not os.environ.get(capability.ENV):
        return False, "it runs on GPUs, and one of these tensors is on cpu"
    library, reason = capability.opened()
    if library is None:
        return False, reason
    if x.is_cpu != library.on_host or not (x.is_cpu or x.is_cuda):
        where = "the CPU, since that library does" if library.on_host else "NVIDIA GPUs"
        return False, f"it runs on {where}, and one of these tensors is on {x.device}"
    gpu = compute_capability() if x.is_cuda else None
    if gpu is not None and gpu < (8, 0):
        return False, f"sparse tensor cores begin with compute capability 8.0, this GPU has {gpu[0]}.{gpu[1]}"
    if any(isinstance(t, Tensor) and t.layout != torch.strided for t in (x, values, indices, *others)):
        return False, "it works on strided tensors; call .to_dense()"
    if x.dtype not in (torch.float16, torch.bfloat16):
        return False, f"it multiplies float16 and bfloat16, and this call is in {x.dtype}"
    if n > 2 or m % 4:
        return False, f"it multiplies patterns that are also 2:4: at most 2 of every M, M a multiple of 4; not {n}:{m}"
    wrong = misfit(x.dtype, values.shape[0], cols)
    return (False, wrong) if wrong else (True, reason)


def _fits_wgrad(values: Tensor, indices: Tensor, n: int, m: int, cols: int, x: Tensor, out_dtype: torch.dtype | None = None) -> Verdict:
    if out_dtype not in (None, x.dtype):
        return False, f"it rounds its results to {x.dtype}, and this one is to be {out_dtype}"
    answer, width = _fits(x, values, indices, n, m, cols), x.shape[1]
    if answer[0] and (not width or width % width_step(x.dtype)):
        return False, f"the columns of x must be a multiple of {width_step(x.dtype)}, not {width}"
    return answer


def _ready(op: str, *args: Any) -> Verdict:
    """Whether this thread can run the GEMM now, and why not."""
    x = args[0] if op == "nm_linear" else args[5]
    session = existing(device_and_stream(x)[0])
    if session is None or (_kind(*args) if op == "nm_linear" else problem_of(op, *args)[0]) not in session.routes:
        if capturing(x):
            return False, "a CUDA graph is being captured, and it has no plan for this GEMM yet: run it once before, in the same thread"
        known = [checked_algorithm(problem, session) for problem in problem_of(op, *args, erf=False)] if session is not None else []
        refused = [reason for reason in known if isinstance(reason, str)]
        if refused and len(refused) == len(known):
            return False, refused[-1]
    return True, capability.opened()[1]


def search(op: str, *args: Any, timer: Seconds | None = None) -> Measurement:
    """Find the fastest correct algorithm for the GEMM of a raw op's call, and use it from now on.

    Every algorithm is checked and timed on random operands; the values of the arguments do not matter. The choice is stored in the table of
    measurements, keyed by the library's version, the GPU, dtypes, layout, epilogue and sizes, with the width rounded up to a power of two.

    Args:
        op: ``"nm_linear"`` or ``"nm_linear_wgrad"``.
        args: the arguments of the raw op.
        timer: returns the seconds of a call; the GPU's clock if None.

    Raises:
        BackendError: the library is not available or does not support the GEMM, or a CUDA graph is being captured.

    Example:
        >>> from nmkernels import BackendError
        >>> try:
        ...     search("nm_mask", torch.ones(4, 4), 2, 4)
        ... except BackendError as error:
        ...     print(error)
        nm_mask: cuSPARSELt supports only nm_linear and nm_linear_wgrad.
    """
    reasons = []
    for problem in problem_of(op, *args):
        try:
            return search_gemm(problem, next(a for a in args if isinstance(a, Tensor)), timer)
        except BackendError as error:
            reasons.append(str(error))  # a less fused GEMM may work
    raise BackendError(reasons[-1])


for _op, _fn, _can in (("nm_linear", linear, _fits), ("nm_linear_wgrad", linear_wgrad, _fits_wgrad)):
    impl(_op, backend=NAME, priority=PRIORITY, supports=_can, ready=partial(_ready, _op), search=search)(_fn)
