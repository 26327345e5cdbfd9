"""One linear autograd Function, driven by a GemmPlan and a weight transform: the three GEMMs of a layer, each by its plan's rule.

Also what the autograd Functions share under ``torch.func`` and in forward mode, and the refusal of second derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from .. import ops
from ..gemm.choose import choose
from ..gemm.methods import DENSE, pack_estimate, run
from ..gemm.plan import STRAIGHT_THROUGH, GemmPlan
from ..gemm.problem import Problem
from ..gemm.route import Operands, wgrad_problem
from ..ops.compress import counts_writes
from ..ops.linear import nm_linear, nm_linear_dgrad, nm_linear_wgrad
from ..pattern import NMError, Pattern
from . import fp8
from .transforms import WeightTransform

TWICE = (
    "there is no second derivative: the backward pass of a sparse layer is once_differentiable, since the gradient through a mask is the "
    "rule of a training method and no derivative of anything. Differentiate once, or use the dense layer."
)
CONSTANT = "the compressed weight, which is a constant"
FORWARD_MODE = (
    "a sparse layer has no derivative in forward mode (torch.func.jvp, jacfwd, forward_ad): its gradient is the rule of a training method "
    "and not a derivative. There is no second derivative (torch.func.hessian) either. Differentiate backward once (torch.func.vjp, jacrev, "
    ".backward()), or use the dense layer."
)

USED, TENSORS, SETTINGS = 3, 7, 7
"""Which argument of the Function W̃ is; how many tensors come first; how many settings, which have no gradient, before the extras."""


class _Once(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.clone()  # which may be written into in place; a view that a Function returns may not

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        raise NMError(TWICE)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        raise NMError(TWICE)


def functional() -> bool:
    """Whether a transform of ``torch.func`` or forward mode is active, which need a Function with ``setup_context``."""
    found = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    if found and torch.compiler.is_compiling():
        # traced, its forward pass would be differentiated instead, through masks that have no derivative
        torch._dynamo.graph_break(
            "a sparse layer under torch.func or in forward mode runs eagerly: its gradient is a rule, not a derivative"
        )
    return found


def once(gradient: Tensor | None, *sources: Tensor | None) -> Tensor | None:
    """``gradient``, made without autograd in a backward pass, whose derivative by any of ``sources`` is refused.

    ``once_differentiable`` does so only for the gradient that came in, and gives zeros under ``torch.func``.
    """
    if gradient is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():  # graphs have no second derivative in any case
        return gradient
    given = [s for s in sources if s is not None]
    if not torch._C._are_functorch_transforms_active():  # a tensor of torch.func may need one at another level
        given = [s for s in given if s.requires_grad]
    return _Once.apply(gradient, *given) if given else gradient


def as_multiplied(x: Tensor) -> Tensor:
    """``x`` ``(..., in)`` as ``nn.Linear`` multiplies and saves it: a copy where its leading dimensions are not one in memory, else itself.

    So ``x`` may be written in place after the layer wherever it may be after ``nn.Linear``, and backward need not copy it again.
    """
    return x if x.is_contiguous() else x.reshape(-1, x.shape[-1]).view(x.shape)


class _Linear(torch.autograd.Function):
    """y = x W̃ᵀ + b forward; dx = g W̃, dW = rule(gᵀ x), db = Σ g backward, each by its plan and transform. Arguments as of ``_remember``."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        ctx.save_for_backward(*_remember(ctx, *args))
        ctx.weight = args[1]  # not saved: an optimizer may step between forward and backward
        y = _fprop(*args)
        # F.linear gives a view of its 2-D result for inputs of other dimensions, and into a view that a Function returned autograd refuses
        # writes in place: nn.ReLU(inplace=True), y /= 8, y[mask] = 0
        return y.detach() if torch.compiler.is_compiling() or y._is_view() else y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, g, ctx.saved_tensors, ctx.weight)


class _FunctionalLinear(torch.autograd.Function):
    """The same for ``torch.func``. Only there: for ``setup_context`` torch inspects the signature at every call, 16 µs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Tensor:
        return _fprop(*args).detach()  # as _Linear does; what torch.vmap wraps may be a view and not say so

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _remember(ctx, *inputs)
        x, weight, _, used, indices, back, back_indices = inputs[:TENSORS]
        back, back_indices = (used, indices) if back is None else (back, back_indices)
        ctx.save_for_backward(x, back, back_indices, weight, *inputs[TENSORS + SETTINGS :])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        return (None,) * len(ctx.needs_input_grad) if g is None else _backward(ctx, g, saved, saved[3])

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        raise NMError(FORWARD_MODE)


def _remember(
    ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    used: Tensor, indices: Tensor | None, back: Tensor | None, back_indices: Tensor | None, transposed: bool, pattern: Pattern | None,
    by: str, back_by: str, seed: Tensor | None, plan: GemmPlan, transform: WeightTransform | None, *extras: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Note what backward has to know; returned are the tensors that it really needs, for a gradient that is wanted."""
    wanted = ctx.needs_input_grad
    need_x, need_w = wanted[0], plan.wgrad != "none" and (wanted[1] or any(wanted[len(wanted) - len(extras) :]))
    traits = None if transform is None else transform.traits
    ctx.straight = traits is None or not traits.own_gradient
    ctx.need_w, ctx.own_gradient = need_w, need_w and not ctx.straight
    ctx.own_dgrad = need_x and traits is not None and traits.own_dgrad
    # not saved like the others: backward itself advances the offset, also that of a forward pass still to come back
    ctx.seed = seed if need_w else None
    ctx.plan, ctx.transform, ctx.reads = plan, transform, () if transform is None else tuple(transform.reads)
    ctx.transposed, ctx.pattern, ctx.by, ctx.cols = transposed, pattern, back_by, x.shape[-1]
    ctx.weight_dtype = None if weight is None else weight.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    if back is None:
        back, back_indices = used, indices
    saved = (x if need_w else None, back if need_x else None, back_indices if need_x else None, weight if ctx.own_gradient else None)
    return (*saved, *extras) if ctx.own_gradient or ctx.own_dgrad else saved


def _fprop(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, used: Tensor, indices: Tensor | None, back: Any, back_indices: Any,
    transposed: bool, pattern: Pattern | None, by: str, back_by: str, seed: Any, plan: GemmPlan, transform: WeightTransform | None,
    *extras: Any,
) -> Tensor:  # fmt: skip
    b = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
    if indices is not None:
        assert pattern is not None
        if weight is None:
            return _by_choice("fprop", x, used, indices, pattern, x.shape[-1], b)
        return nm_linear(x, used, indices, pattern.n, pattern.m, x.shape[-1], b, backend=by)
    if plan.fp8 is None:
        return F.linear(x, used, b)
    sparse = transform is not None and ops.tensor_core_pattern(transform.pattern)
    if sparse and fp8.multiplies(plan.fp8, "fprop", used.shape[0], used.shape[1], x.numel(), x):
        return fp8.linear(plan.fp8, x, used, b)
    p, q, step = fp8.operands(plan.fp8, "fprop", x, used)
    y = (F.linear(p, q) * step).to(x.dtype)
    return y if b is None else y + b


def _backward(ctx: Any, g: Tensor, saved: tuple[Any, ...], source: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of a call; ``source``: the weight, by which their own derivatives are refused too."""
    if source is None and ctx.needs_input_grad[USED]:
        raise NMError(f"linear_compressed has no gradient by {CONSTANT}: train a SparseLinear, or detach its values.")
    if not torch.is_grad_enabled():
        dx, dw, db, learned = _gradients(ctx, g, *saved)
    else:
        with torch.no_grad():
            dx, dw, db, learned = _gradients(ctx, g, *saved)
        x, _, _, _, *extras = saved
        dx, db = once(dx, g, source, *extras), once(db, g)
        dw = once(dw, g, x, source, *extras)
        learned = {name: once(d, g, x, source, *extras) for name, d in learned.items()}
    return dx, dw, db, *[None] * (TENSORS - USED + SETTINGS), *map(learned.get, ctx.reads)


def _gradients(
    ctx: Any, g: Tensor, x: Any, back: Any, indices: Tensor | None, weight: Any, *extras: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None, dict[str, Tensor | None]]:
    extras, transform = extras[: len(ctx.reads)], ctx.transform
    dx = dw = db = None
    learned: dict[str, Tensor | None] = {}
    if ctx.needs_input_grad[0]:
        dx = _dgrad(ctx, g, transform.for_dgrad(back, *extras) if ctx.own_dgrad else back, indices)
    rows = g.reshape(-1, g.shape[-1])
    if ctx.need_w:
        dw = _wgrad(ctx.plan, rows, x.reshape(-1, x.shape[-1]), ctx.seed).to(ctx.weight_dtype)
        if ctx.own_gradient:
            dw, learned = transform.gradient(dw, weight, *extras)
        if not ctx.needs_input_grad[1]:
            dw = None
    if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
        db = rows.sum(0).to(ctx.bias_dtype)
    return dx, dw, db, learned


def _dgrad(ctx: Any, g: Tensor, back: Tensor, indices: Tensor | None) -> Tensor:
    if indices is not None:
        n, m = ctx.pattern.n, ctx.pattern.m
        if ctx.weight_dtype is None:
            return _by_choice("dgrad", g, back, indices, ctx.pattern, ctx.cols)
        if ctx.transposed:
            return nm_linear(g, back, indices, n, m, g.shape[-1], None, backend=ctx.by)
        return nm_linear_dgrad(g, back, indices, n, m, ctx.cols, backend=ctx.by)
    if ctx.plan.fp8 is None:
        return g.matmul(back)
    p, q, step = fp8.operands(ctx.plan.fp8, "dgrad", g, back)
    return (p.matmul(q) * step).to(g.dtype)


def _by_choice(
    role: str, other: Tensor, values: Tensor, indices: Tensor, pattern: Pattern, cols: int, bias: Tensor | None = None
) -> Tensor:
    """fprop or dgrad of a compressed weight ``(out, cols)`` that is a constant, by the method that is chosen for it."""
    rows, tokens = values.shape[0], other.numel() // max(1, other.shape[-1])
    problem = Problem(role, tokens, rows, cols, pattern.n, pattern.m, other.dtype, other.device, ("rows",))
    (method,) = choose(problem)
    return run(method, problem, other, {"rows": (values, indices)}, bias=bias)


def _wgrad(plan: GemmPlan, g: Tensor, x: Tensor, seed: Tensor | None) -> Tensor:
    """∂L/∂W̃ = gᵀ x ``(out, in)`` of g ``(tokens, out)`` and x ``(tokens, in)``; gᵀ may first be replaced by an N:M tensor."""
    if plan.wgrad == "dense":
        if plan.fp8 is None:
            return g.t().matmul(x)
        p, q, step = fp8.operands(plan.fp8, "wgrad", g, x)
        return (p.t().matmul(q) * step).to(x.dtype)
    tokens, words = g.shape[0], None
    if plan.wgrad == "mvue":
        if seed is not None and torch._C._are_functorch_transforms_active():
            raise NMError(
                "linear: the gradient of the weight is an estimate that advances the layer's seed, which torch.func does not let a "
                "backward pass do. Set layer.seed = None for numbers from torch's generator, with randomness='different' under torch.vmap."
            )
        words = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=g.device) if seed is None else seed
    problem = wgrad_problem(plan, tokens, g.shape[1], x.shape[1], x.dtype, x.device)
    method = None
    if plan.fprop == "auto":
        (method,) = choose(problem)
    elif plan.fprop == "dense" and x.is_cpu and plan.fp8 is None:
        method = DENSE
    if method is not None:
        dw = run(method, problem, x, g, seed=words)
    else:
        values, indices = pack_estimate(problem, g, words)
        if plan.fp8 is None:
            dw = nm_linear_wgrad(values, indices, plan.n, plan.m, tokens, x)
        elif (plan.n, plan.m) == (2, 4) and fp8.multiplies(plan.fp8, "wgrad", g.shape[1], tokens, x.shape[1], x):
            dw = fp8.wgrad(plan.fp8, values, indices, x)
        else:  # the zeros that the estimate left out have no part in its largest magnitude
            p, q, step = fp8.operands(plan.fp8, "wgrad", values, x)
            dw = (nm_linear_wgrad(p, indices, plan.n, plan.m, tokens, q) * step).to(x.dtype)
    if words is not None and seed is not None:
        seed[1:].add_(1)  # on the device, so that a replayed graph draws anew
    return dw


def linear(
    x: Tensor,
    weight: Tensor,
    used: Tensor | Operands,
    bias: Tensor | None = None,
    plan: GemmPlan = STRAIGHT_THROUGH,
    seed: Tensor | None = None,
    transform: WeightTransform | None = None,
    extras: Sequence[Tensor] = (),
) -> Tensor:
    """y = x W̃ᵀ + b, the gradient of W̃ passed to the master weight by the transform's rule, without one straight through.

    Forward multiplies ``used`` (W̃); backward gives ``∂L/∂x = g W̃`` and, straight through, ``∂L/∂weight = gᵀ x``, unmasked, in the
    dtype of ``weight`` (SR-STE, Zhou et al. 2021, eq. 5 without its decay, which belongs after clipping).

    ``torch.func`` knows it. A second derivative and forward mode raise ``NMError``. In a function that ``torch.compile`` compiles together
    with ``torch.func`` it runs eagerly.

    Args:
        weight: the master weight ``(out, in)``; it receives the gradient and is read only by a rule that is not straight through.
        used: W̃ ``(out, in)`` in x's dtype and dense layout, or ``Operands`` where a GEMM reads a packed form.
        seed: int64 ``(2,)`` (seed, offset) for ``wgrad="mvue"``; backward advances the offset by one, in place, on the device. With None
            both are drawn from torch's generator.
        transform: what made ``used`` from ``weight``, with the ``extras`` that it read; see ``WeightTransform``.
    """
    packed = (used, None, None, None, False, None, "", "") if isinstance(used, Tensor) else used
    transforming = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    kind = _FunctionalLinear if transforming and functional() else _Linear
    return kind.apply(x if x.dim() <= 2 else as_multiplied(x), weight, bias, *packed, seed, plan, transform, *extras)


def linear_compressed(x: Tensor, weight: ops.Compressed, bias: Tensor | None = None) -> Tensor:
    """y = x Wᵀ + b from the compressed W ``(out, in)``, a constant; differentiable in x ``(..., in)`` and in the bias."""
    p: Pattern = weight.pattern
    if not torch.is_grad_enabled() and forward_ad._current_level < 0:
        b = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
        return nm_linear(x, weight.values, weight.indices, p.n, p.m, x.shape[-1], b)
    form = [t if counts_writes(t) else t.clone() for t in (weight.values, weight.indices)]
    kind = _FunctionalLinear if functional() else _Linear
    return kind.apply(x, None, bias, *form, None, None, False, p, "", "", None, STRAIGHT_THROUGH, None)
