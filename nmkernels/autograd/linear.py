"""The differentiable GEMMs of sparse linear layers: three, each computed as its GemmPlan says, and a weight transform's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from .. import ops
from ..backends.shared import product
from ..gemm.choose import choose
from ..gemm.methods import DENSE, OP, UNESTIMATED, Method, pack_estimate, run
from ..gemm.plan import STRAIGHT_THROUGH, GemmPlan
from ..gemm.problem import Problem
from ..gemm.route import Operands, wgrad_problem
from ..ops.compress import counts_writes
from ..ops.integers import kind_of, nm_dequantize_values, nm_linear_integers
from ..ops.linear import nm_linear, nm_linear_dgrad, nm_linear_wgrad, operand_for
from ..ops.pack import tensor_core_pattern
from ..pattern import NMError, Pattern, ShapeError
from . import fp8
from .function import functional, once, with_functional
from .transforms import WeightTransform

SCALAR = "a linear layer takes an input (..., in), and this one has no dimension."
CONSTANT = "the compressed weight, which is a constant"


def as_multiplied(x: Tensor) -> Tensor:
    """``x`` ``(..., in)`` as ``nn.Linear`` saves it: itself if its leading dimensions can be flattened to a view, else a copy.

    Then ``x`` may be modified in place after the layer exactly where ``nn.Linear`` allows it, and backward need not copy it again.
    """
    return x if x.is_contiguous() else x.reshape(-1, x.shape[-1]).view(x.shape)


# ---- y = x W̃ᵀ + b; backward dx = g W̃, dW = rule(gᵀ x), db = Σ g, as plan and transform say


def _fprop(
    functional: bool, x: Tensor, weight: Tensor, bias: Tensor | None, used: Operands, plan: GemmPlan, seed: Tensor | None,
    transform: WeightTransform | None, *extras: Tensor,
) -> Tensor:  # fmt: skip
    b = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
    w, pattern = used.weight, used.pattern
    if used.indices is not None:
        assert pattern is not None
        y = nm_linear(x, w, used.indices, pattern.n, pattern.m, x.shape[-1], b, backend=used.backend)
    elif plan.fp8 is None:
        y = F.linear(x, w, b)
    elif (
        transform is not None
        and tensor_core_pattern(transform.pattern)
        and fp8.multiplies(plan.fp8, "fprop", w.shape[0], w.shape[1], x.numel(), x)
    ):
        y = fp8.linear(plan.fp8, x, w, b)
    else:
        p, q, step = fp8.operands(plan.fp8, "fprop", x, w)
        y = (F.linear(p, q) * step).to(x.dtype)
        y = y if b is None else y + b
    # F.linear returns a view of its 2-D result for inputs of other dimensions, and autograd refuses in-place writes to a view that a
    # Function returns: nn.ReLU(inplace=True), y /= 8, y[mask] = 0. Under torch.vmap and in compiled graphs _is_view() may miss one
    return y.detach() if functional or torch.compiler.is_compiling() or y._is_view() else y


def _remember(
    ctx: Any, functional: bool, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, used: Operands, plan: GemmPlan,
    seed: Tensor | None, transform: WeightTransform | None, *extras: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    needs, reads = ctx.needs_input_grad, () if transform is None else tuple(transform.reads)
    first = len(needs) - len(extras)
    need_x, need_w = needs[0], plan.wgrad != "none" and (needs[1] or any(needs[first : first + len(reads)]))
    extras, idle = extras[: len(reads)], extras[len(reads) :]
    ctx.idle = (None,) * len(idle) if functional else idle
    traits = None if transform is None else transform.traits
    straight = traits is None or not traits.own_gradient
    ctx.need_w, ctx.own_gradient = need_w, need_w and not straight
    ctx.own_dgrad = need_x and traits is not None and traits.own_dgrad
    # not saved like the others: backward advances the offset in place, also of other forward passes that wait for their backward
    ctx.seed = seed if need_w else None
    ctx.plan, ctx.transform, ctx.reads = plan, transform, reads
    ctx.transposed, ctx.pattern, ctx.backend, ctx.cols = used.transposed, used.pattern, used.back_backend, x.shape[-1]
    ctx.weight_dtype = weight.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    back, back_indices = (used.weight, used.indices) if used.back is None else (used.back, used.back_indices)
    if functional:
        ctx.weight = None
        return x, back, back_indices, weight, *extras
    ctx.weight = weight  # not saved: an optimizer may step between forward and backward
    saved = (x if need_w else None, back if need_x else None, back_indices if need_x else None, weight if ctx.own_gradient else None)
    return (*saved, *extras) if ctx.own_gradient or ctx.own_dgrad else saved


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    if not torch.is_grad_enabled():
        dx, dw, db, learned = _gradients(ctx, g, *saved)
    else:
        with torch.no_grad():
            dx, dw, db, learned = _gradients(ctx, g, *saved)
        x, _, _, weight, *extras = saved
        weight = weight if ctx.weight is None else ctx.weight
        dx, db = once(dx, g, weight, *extras), once(db, g)
        dw = once(dw, g, x, weight, *extras)
        learned = {name: once(d, g, x, weight, *extras) for name, d in learned.items()}
    return dx, dw, db, None, None, None, None, *map(learned.get, ctx.reads), *(p if p is None else torch.zeros_like(p) for p in ctx.idle)


def _gradients(
    ctx: Any, g: Tensor, x: Any, back: Any, indices: Tensor | None, weight: Any, *extras: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None, dict[str, Tensor | None]]:
    extras, transform = extras[: len(ctx.reads)], ctx.transform
    dx = dw = db = None
    learned: dict[str, Tensor | None] = {}
    if ctx.needs_input_grad[0]:
        back = transform.for_dgrad(back, *extras) if ctx.own_dgrad else back
        if indices is not None and ctx.transposed:
            dx = nm_linear(g, back, indices, ctx.pattern.n, ctx.pattern.m, g.shape[-1], None, backend=ctx.backend)
        elif indices is not None:
            dx = nm_linear_dgrad(g, back, indices, ctx.pattern.n, ctx.pattern.m, ctx.cols, backend=ctx.backend)
        elif ctx.plan.fp8 is None:
            dx = g.matmul(back)
        else:
            p, q, step = fp8.operands(ctx.plan.fp8, "dgrad", g, back)
            dx = (p.matmul(q) * step).to(g.dtype)
    rows = g.reshape(-1, g.shape[-1])
    if ctx.need_w:
        dw = _wgrad(ctx.plan, rows, x.reshape(-1, x.shape[-1]), ctx.seed, ctx.weight_dtype).to(ctx.weight_dtype)
        if ctx.own_gradient:
            dw, learned = transform.gradient(dw, weight, *extras)
        if not ctx.needs_input_grad[1]:
            dw = None
    if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
        db = rows.sum(0).to(ctx.bias_dtype)
    return dx, dw, db, learned


# ---- y = x Wᵀ + b of a constant compressed weight; backward dx = g W, for which integers are decoded again, and db = Σ g


def _constant_fprop(
    functional: bool, x: Tensor, bias: Tensor | None, values: Tensor, indices: Tensor, step: Tensor | None, pattern: Pattern,
    shape: tuple[int, int], group: int,
) -> Tensor:  # fmt: skip
    b = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
    y = _by_choice("fprop", x, values, indices, pattern, shape, b, step, group)
    return y.detach() if functional or torch.compiler.is_compiling() or y._is_view() else y  # as in _fprop


def _constant_remember(
    ctx: Any, functional: bool, y: Tensor, x: Tensor, bias: Tensor | None, values: Tensor, indices: Tensor, step: Tensor | None,
    pattern: Pattern, shape: tuple[int, int], group: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    ctx.pattern, ctx.shape, ctx.bias_dtype = pattern, shape, None if bias is None else bias.dtype
    return (values, indices, step) if ctx.needs_input_grad[0] else (None, None, None)


def _constant_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    if any(ctx.needs_input_grad[2:5]):
        raise NMError(f"linear_compressed has no gradient with respect to {CONSTANT}: train a SparseLinear, or detach its values.")
    dx = db = None
    with torch.no_grad():
        if ctx.needs_input_grad[0]:
            values, indices, step = ctx.saved_tensors
            if step is not None:
                values = nm_dequantize_values(values, step, ctx.pattern.kept(ctx.shape[1]), g.dtype)
            dense = step is not None and ctx.pattern.m == 1
            dx = g.matmul(values) if dense else _by_choice("dgrad", g, values, indices, ctx.pattern, ctx.shape)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[1]:
            db = g.reshape(-1, g.shape[-1]).sum(0).to(ctx.bias_dtype)
    return once(dx, g), once(db, g), *[None] * 6


_Constant, _FunctionalConstant = with_functional(_constant_fprop, _constant_remember, _constant_backward)


def _by_choice(
    role: str, other: Tensor, values: Tensor, indices: Tensor, pattern: Pattern, shape: tuple[int, int], bias: Tensor | None = None,
    step: Tensor | None = None, group: int = 0,
) -> Tensor:  # fmt: skip
    """fprop or dgrad of a constant compressed weight of this shape, by the method that ``choose`` returns."""
    tokens = other.numel() // max(1, other.shape[-1])
    rows, cols = shape
    problem = Problem(role, tokens, rows, cols, pattern.n, pattern.m, other.dtype, other.device, ("rows",))
    packed: tuple[Tensor, ...] = (values, indices)
    if step is not None:
        problem = problem._replace(values=kind_of(values), group=group)
        packed = (values, indices, step)
    (method,) = choose(problem)
    return run(method, problem, other, {"rows": packed}, bias=bias)


def _wgrad(plan: GemmPlan, g: Tensor, x: Tensor, seed: Tensor | None, dtype: torch.dtype) -> Tensor:
    """∂L/∂W̃ = gᵀ x ``(out, in)`` from g ``(tokens, out)`` and x ``(tokens, in)``, with gᵀ replaced by an N:M tensor if the plan says so.

    In x's dtype; but if x has 16 bits and the weight, of ``dtype``, is float32, that of the GEMM's sums where a GEMM can return them.
    """
    wide = dtype if dtype == torch.float32 and x.element_size() == 2 else None
    if plan.wgrad == "dense":
        if plan.fp8 is None:
            return g.t().matmul(x) if wide is None else product(g.t(), x, wide)
        p, q, step = fp8.operands(plan.fp8, "wgrad", g, x)
        return (p.t().matmul(q) * step).to(x.dtype)
    tokens, words = g.shape[0], None
    problem = wgrad_problem(plan, tokens, g.shape[1], x.shape[1], x.dtype, x.device)
    # the last form is that of tensor cores, if there is one
    method = None if plan.fp8 is not None else Method(OP, problem.forms[-1])
    if plan.fprop == "auto":
        (method,) = choose(problem)
    elif plan.fprop == "dense" and x.is_cpu and plan.fp8 is None:
        method = DENSE
    if plan.wgrad == "mvue" and method != UNESTIMATED:
        if seed is not None and torch._C._are_functorch_transforms_active():
            raise NMError(
                "linear: the weight gradient is a random estimate that advances the layer's seed in place, which torch.func does not allow "
                "in a backward pass. Set layer.seed = None to use torch's generator, with randomness='different' under torch.vmap."
            )
        words = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=g.device) if seed is None else seed
    if method is not None:
        dw = run(method, problem, x, g, seed=words, dtype=wide)
    else:
        assert plan.fp8 is not None
        values, indices = pack_estimate(problem, g, words)
        if (plan.n, plan.m) == (2, 4) and fp8.multiplies(plan.fp8, "wgrad", g.shape[1], tokens, x.shape[1], x):
            dw = fp8.wgrad(plan.fp8, values, indices, x)
        else:  # quantising the packed values is enough: the others are zeros, which do not change the largest magnitude
            p, q, step = fp8.operands(plan.fp8, "wgrad", values, x)
            dw = (nm_linear_wgrad(p, indices, plan.n, plan.m, tokens, q) * step).to(x.dtype)
    if words is not None and seed is not None:
        seed[1:].add_(1)  # on the device, so that a replayed graph draws new numbers
    return dw


_Linear, _FunctionalLinear = with_functional(_fprop, _remember, _backward)


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
    """Multiply by the effective weight, y = x W̃ᵀ + b, and pass the gradient of W̃ to the master weight.

    Backward computes ∂L/∂x = g W̃, ∂L/∂b = Σ g, and ∂L/∂weight by the transform's rule; without a transform straight through,
    ∂L/∂weight = gᵀ x, unmasked, in the dtype of ``weight`` (SR-STE, Zhou et al. 2021, eq. 5 without its decay, which the optimizer adds
    after clipping).

    Works with ``torch.func``; under ``torch.compile`` that combination runs eagerly.

    Args:
        x: ``(..., in)``.
        weight: the master weight ``(out, in)``; it receives the gradient. Only a rule that is not straight through reads its values.
        used: W̃ ``(out, in)`` in x's dtype and dense layout, or ``Operands`` where a GEMM reads a packed form.
        bias: ``(out,)`` or None.
        plan: how each GEMM is computed.
        seed: int64 ``(2,)`` (seed, offset) for ``wgrad="mvue"``; backward advances the offset by one, in place, on the device. If None,
            both are drawn from torch's generator.
        transform: the ``WeightTransform`` that made ``used`` from ``weight``.
        extras: the tensors that ``transform`` reads; those that follow them take no part and receive a gradient of zeros.

    Raises:
        NMError: on a second derivative, and in forward mode.

    Example:
        >>> w = torch.tensor([[1.0, -2.0]], requires_grad=True)
        >>> linear(torch.tensor([[3.0, 4.0]]), w, ops.prune(w.detach(), "1:2")).backward()
        >>> w.grad
        tensor([[3., 4.]])
    """
    if not x.dim():
        raise ShapeError(SCALAR)
    used = Operands(used) if isinstance(used, Tensor) else used
    transforming = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    kind = _FunctionalLinear if transforming and functional() else _Linear
    return kind.apply(x if x.dim() <= 2 else as_multiplied(x), weight, bias, used, plan, seed, transform, *extras)


def linear_compressed(x: Tensor, weight: ops.Compressed, bias: Tensor | None = None) -> Tensor:
    """Multiply by a constant compressed weight, y = x Wᵀ + b; differentiable in x and the bias.

    Args:
        x: ``(..., in)``, in any floating dtype if the weight has integers as values, else in the weight's.
        weight: W ``(out, in)``.
        bias: ``(out,)`` or None.

    Raises:
        NMError: on a gradient with respect to the values of ``weight``, on a second derivative, and in forward mode.

    Example:
        >>> linear_compressed(torch.ones(3, 8), ops.compress(torch.randn(4, 8), "2:4")).shape
        torch.Size([3, 4])
    """
    if not x.dim():
        raise ShapeError(SCALAR)
    p: Pattern = weight.pattern
    if not torch.is_grad_enabled() and forward_ad._current_level < 0:
        b = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
        if weight.step is not None and not torch.compiler.is_compiling():
            return nm_linear_integers(x, weight.values, weight.indices, weight.step, p.n, p.m, weight.shape[1], b)
        if weight.step is not None:
            return _by_choice(
                "fprop", x, weight.values, weight.indices, p, (weight.shape[0], weight.shape[1]), b, weight.step, weight.group
            )
        return nm_linear(x, *operand_for(x, weight), p.n, p.m, weight.shape[1], b)
    form = [t if t is None or counts_writes(t) else t.clone() for t in (weight.values, weight.indices, weight.step)]
    # with the sizes: a graph that is compiled again for another layer has those of tensors as symbols, and the choice reads numbers
    shape = weight.shape[0], weight.shape[1]
    return (_FunctionalConstant if functional() else _Constant).apply(x, bias, *form, p, shape, weight.group)
