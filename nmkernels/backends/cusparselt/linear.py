"""nm_linear and nm_linear_wgrad by cuSPARSELt, from every packed form that is also a valid 2:4 one.

What follows the GEMM is done by the library where it is right there: a bias, ReLU, a residual where no activation comes between, and
GELU if the library's is ours, Φ by the error function and not by tanh, which is looked at once. The rest is done by torch afterwards, on
the rounded GEMM. Each of these ways is a ``Route``, made at the first call of a GEMM in a thread; later calls go it straight.

Which GELU the library computes: NVIDIA does not say, and the two that people use differ by up to 0.0005, as much as fp16 rounds at 1.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import capability
from ...capability import compute_capability
from ...dispatch import Tuning, Verdict, impl
from ...pattern import BackendError
from ...reference.linear import activate
from .algorithms import DEFAULT, ready_for, refusal, search
from .blobs import aligned, blob_of, compress_as, expanded
from .context import Here, Problem, Ready, capturing, elsewhere, existing, here, misfit, place, width_step

SIZE = 32

_GELU: dict[tuple[int, int, torch.dtype], bool] = {}


def by_erf(dtype: torch.dtype, at: Here, like: Tensor, stream: int) -> bool:
    """Whether the library's GELU is y·Φ(y) to the last bits of a dtype; looked at once, outside of capture."""
    key = at.library.version, at.device, dtype
    found = _GELU.get(key)
    if found is None and not capturing(like):
        with torch.no_grad():
            found = _GELU[key] = _look(dtype, at, like, stream)
    return bool(found)


def _look(dtype: torch.dtype, at: Here, like: Tensor, stream: int) -> bool:
    """Multiply with the unit matrix. At -3 the two differ by a tenth of their value, while rounding errs by 1/256 at most."""
    problem = Problem("nt", dtype, dtype, SIZE, SIZE, SIZE, activation="gelu")
    y = torch.linspace(-3, 3, SIZE * SIZE, device=like.device).to(dtype).reshape(SIZE, SIZE)
    out = torch.full_like(y, torch.nan)
    try:
        ready = at.plan(problem, DEFAULT, like)
        blob = compress_as("nt", torch.eye(SIZE, dtype=dtype, device=like.device), at, stream)
        at.run(ready, blob.address, y, out, None, None, stream, 1.0)
    except BackendError:
        return False
    right = F.gelu(y.double())
    return bool(((out.double() - right).abs() <= 2 * torch.finfo(dtype).eps * right.abs() + 1e-6).all())


def forget() -> None:
    _GELU.clear()


NAME, PRIORITY = "cusparselt", 3
"""Below the hand-written kernels: who has measured that it is faster calls it by name."""

OLDEST_GPU = (8, 0)
DTYPES = (torch.float16, torch.bfloat16)


class Route(NamedTuple):
    """How an fprop is done: the plan, whether its bias and residual are the library's, and what comes after it."""

    ready: Ready
    bias: bool
    residual: bool
    after: str
    """What torch does afterwards."""
    pad: int
    """Tokens that are added, since the library takes multiples of 8."""
    whole: bool
    """Whether the GEMM is the result."""


def problems(x: Tensor, rows: int, cols: int, tokens: int, bias: bool, activation: str, residual: bool, erf: bool) -> list[Problem]:
    """The GEMMs that an fprop may be done by, the most fused one first."""
    step = width_step(x.dtype)
    width = (tokens + step - 1) // step * step
    theirs = {"relu2": "relu", "gelu": "gelu" if erf else ""}.get(activation, "")
    c = residual and not activation
    fused = dict.fromkeys([(bias, theirs, c), (bias, "", c), (bias, "", False), (False, "", False)])
    return [Problem("nt", x.dtype, x.dtype, rows, cols, width, *also) for also in fused]


def _route(at: Here, x: Tensor, rows: int, cols: int, tokens: int, bias: bool, activation: str, residual: bool, stream: int) -> Route:
    reasons: list[str] = []
    erf = activation == "gelu" and by_erf(x.dtype, at, x, stream)
    for problem in problems(x, rows, cols, tokens, bias, activation, residual, erf):
        try:
            ready = ready_for(problem, at, x, stream)
        except BackendError as error:
            if capturing(x):
                raise
            reasons.append(str(error))
            continue
        after = {"relu": "square", "gelu": ""}.get(problem.activation, activation)
        pad = problem.width - tokens
        whole = not pad and not after and (problem.bias, problem.residual) == (bias, residual)
        return Route(ready, problem.bias, problem.residual, after, pad, whole)
    raise BackendError(reasons[-1])


def linear(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = "",
    residual: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    rows, tokens = values.shape[0], x.numel() // cols
    if not tokens:
        return x.new_empty(*x.shape[:-1], rows) if out is None else out
    device, stream = place(x)
    if elsewhere(x, device):
        with torch.cuda.device(device):
            return linear(x, values, indices, n, m, cols, bias, activation, residual, out)
    at = here(device)
    key = x.dtype, rows, cols, tokens, bias is None, activation, residual is None
    route: Route | None = at.routes.get(key)
    if route is None:
        route = at.routes[key] = _route(at, x, rows, cols, tokens, bias is not None, activation, residual is not None, stream)
    blob = blob_of(values, indices, (n, m, cols), at, stream)
    leading = x.shape[:-1]
    x = aligned(x)
    if route.pad:
        x = F.pad(x.reshape(tokens, cols), (0, 0, 0, route.pad))
        y = x.new_empty(tokens + route.pad, rows)
    else:
        y = x.new_empty(*leading, rows) if out is None or not out.is_contiguous() or out.data_ptr() & 15 else out
    b = aligned(bias) if bias is not None and route.bias else None
    r = None
    if residual is not None and route.residual:
        r = aligned(F.pad(residual.reshape(tokens, rows), (0, 0, 0, route.pad)) if route.pad else residual)
    at.run(route.ready, blob.address, x, y, b, r, stream, 1.0)
    if route.whole and (out is None or y is out):
        return y
    return _finished(y, route, tokens, (*leading, rows), bias, residual, out)


def _finished(
    y: Tensor, route: Route, tokens: int, shape: tuple[int, ...], bias: Tensor | None, residual: Tensor | None, out: Tensor | None
) -> Tensor:
    """What the library has not done, on the rounded GEMM."""
    if route.pad:
        y = y[:tokens]
    y = y.view(shape)
    if bias is not None and not route.bias:
        y.add_(bias)
    if route.after:
        y = y.square() if route.after == "square" else activate("linear", y, route.after)
    if residual is not None and not route.residual:
        y.add_(residual)
    return y if out is None or y is out else out.copy_(y)


def linear_wgrad(values: Tensor, indices: Tensor, n: int, m: int, cols: int, x: Tensor, out: Tensor | None = None) -> Tensor:
    """``nm_linear_wgrad``. A gradient is multiplied once, so its blob is not remembered."""
    rows, width = values.shape[0], x.shape[1]
    device, stream = place(x)
    if elsewhere(x, device):
        with torch.cuda.device(device):
            return linear_wgrad(values, indices, n, m, cols, x, out)
    at = here(device)
    ready = ready_for(Problem("tn.packed", x.dtype, x.dtype, rows, cols, width), at, x, stream)
    blob = compress_as("tn.packed", expanded(values, indices, (n, m, cols)), at, stream)
    dw = x.new_empty(rows, width) if out is None or not out.is_contiguous() or out.data_ptr() & 15 else out
    at.run(ready, blob.address, aligned(x), dw, None, None, stream, 1.0)
    return dw if out is None or dw is out else out.copy_(dw)


# ---- what it takes


def _runnable(x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, others: tuple[Tensor | None, ...]) -> Verdict:
    if x.is_cpu and not os.environ.get(capability.ENV):
        return False, "it runs on GPUs, and one of these tensors is on cpu"
    library, reason = capability.opened()
    if library is None:
        return False, reason
    if x.is_cpu != library.on_host or not (x.is_cpu or x.is_cuda):
        where = "the CPU, since that library does" if library.on_host else "NVIDIA GPUs"
        return False, f"it runs on {where}, and one of these tensors is on {x.device}"
    found = compute_capability() if x.is_cuda else None
    if found is not None and found < OLDEST_GPU:
        return False, f"sparse tensor cores begin with compute capability 8.0, this GPU has {found[0]}.{found[1]}"
    if any(t is not None and t.layout != torch.strided for t in (x, values, indices, *others)):
        return False, "it works on strided tensors; call .to_dense()"
    if x.dtype not in DTYPES:
        return False, f"it multiplies float16 and bfloat16, and this call is in {x.dtype}"
    if n > 2 or m % 4:
        return False, f"it multiplies what is 2:4 at the same time: at most 2 of every M, M a multiple of 4; not {n}:{m}"
    wrong = misfit(x.dtype, values.shape[0], cols)
    return (False, wrong) if wrong else (True, reason)


def _fits(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = "",
    residual: Tensor | None = None,
) -> Verdict:  # fmt: skip
    return _runnable(x, values, indices, n, m, cols, (bias, residual))


def _fits_wgrad(values: Tensor, indices: Tensor, n: int, m: int, cols: int, x: Tensor) -> Verdict:
    found, width = _runnable(x, values, indices, n, m, cols, ()), x.shape[1]
    if found[0] and (not width or width % width_step(x.dtype)):
        return False, f"the columns of x must be a multiple of {width_step(x.dtype)}, not {width}"
    return found


def _ready(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = "",
    residual: Tensor | None = None,
) -> Verdict:  # fmt: skip
    rows, tokens = values.shape[0], x.numel() // cols if cols else 0
    key = x.dtype, rows, cols, tokens, bias is None, activation, residual is None
    return _known(key, x, problems(x, rows, cols, tokens, bias is not None, activation, residual is not None, False))


def _ready_wgrad(values: Tensor, indices: Tensor, n: int, m: int, cols: int, x: Tensor) -> Verdict:
    problem = Problem("tn.packed", x.dtype, x.dtype, values.shape[0], cols, x.shape[1])
    return _known(problem, x, [problem])


def _known(key: Any, x: Tensor, candidates: list[Problem]) -> Verdict:
    """Whether this thread can do the GEMM now."""
    at = existing(place(x)[0])
    if at is None or key not in at.routes:
        if capturing(x):
            return False, "a CUDA graph is being captured, and it has no plan for this GEMM yet: run it once before, in the same thread"
        reasons = [refusal(problem, at) for problem in candidates] if at is not None else [""]
        if all(reasons):
            return False, reasons[-1]
    return True, capability.opened()[1]


def register() -> None:
    tuning = Tuning(prepare=search, keeps=True)
    impl("nm_linear", backend=NAME, priority=PRIORITY, supports=_fits, ready=_ready, tuning=tuning)(linear)
    impl("nm_linear_wgrad", backend=NAME, priority=PRIORITY, supports=_fits_wgrad, ready=_ready_wgrad, tuning=tuning)(linear_wgrad)


def problem_of(op: str, *args: Any) -> list[Problem]:
    """The GEMMs by which a raw op's call may be done, the most fused one first."""
    if op == "nm_linear_wgrad":
        values, _, _, _, cols, x = args
        return [Problem("tn.packed", x.dtype, x.dtype, values.shape[0], cols, x.shape[1])]
    if op != "nm_linear":
        raise BackendError(f"{op}: cuSPARSELt does nm_linear and nm_linear_wgrad.")
    x, values, _, _, _, cols = args[:6]
    options: dict[str, Any] = dict(zip(("bias", "activation", "residual"), args[6:], strict=False))
    bias, activation, residual = options.get("bias"), options.get("activation") or "", options.get("residual")
    erf = activation == "gelu"
    return problems(x, values.shape[0], cols, x.numel() // cols, bias is not None, activation, residual is not None, erf)
