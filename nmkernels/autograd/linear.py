"""The autograd Function of sparse linear layers: three GEMMs, each computed as its GemmPlan says, and a weight transform's gradient.

Also helpers that all autograd Functions here share: support of ``torch.func``, and errors for forward mode and second derivatives.
"""

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
from .transforms import WeightTransform

TWICE = (
    "there is no second derivative: the backward pass of a sparse layer is once_differentiable, since the gradient through a mask is the "
    "rule of a training method and not a derivative. Differentiate once, or use the dense layer."
)
SCALAR = "a linear layer takes an input (..., in), and this one has no dimension."
CONSTANT = "the compressed weight, which is a constant"
FORWARD_MODE = (
    "a sparse layer has no derivative in forward mode (torch.func.jvp, jacfwd, forward_ad): its gradient is the rule of a training method "
    "and not a derivative. There is no second derivative (torch.func.hessian) either. Differentiate backward once (torch.func.vjp, jacrev, "
    ".backward()), or use the dense layer."
)

USED, TENSORS, SETTINGS = 3, 7, 7
"""Arguments of the Function: the position of W̃, the number of tensors, which come first, and of settings, which come before the extras."""


class _Once(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.clone()  # not a view: autograd refuses in-place writes to views that a Function returns

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
    """Whether a ``torch.func`` transform or forward mode is active; these need a Function with ``setup_context``."""
    active = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    if active and torch.compiler.is_compiling():
        # tracing would differentiate the forward pass, through masks that have no derivative, instead of using backward
        torch._dynamo.graph_break(
            "a sparse layer under torch.func or in forward mode runs eagerly: its gradient is a rule, not a derivative"
        )
    return active


def once(gradient: Tensor | None, *sources: Tensor | None) -> Tensor | None:
    """Return ``gradient`` such that differentiating it with respect to any of ``sources`` raises; for use in backward passes.

    ``once_differentiable`` raises only for the incoming gradient, and gives zeros under ``torch.func``.
    """
    if gradient is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():  # compiled graphs have no second derivative
        return gradient
    tensors = [s for s in sources if s is not None]
    if not torch._C._are_functorch_transforms_active():  # under torch.func a tensor may require grad at another level
        tensors = [s for s in tensors if s.requires_grad]
    return _Once.apply(gradient, *tensors) if tensors else gradient


def as_multiplied(x: Tensor) -> Tensor:
    """``x`` ``(..., in)`` as ``nn.Linear`` saves it: itself if its leading dimensions can be flattened to a view, else a copy.

    Then ``x`` may be modified in place after the layer exactly where ``nn.Linear`` allows it, and backward need not copy it again.
    """
    return x if x.is_contiguous() else x.reshape(-1, x.shape[-1]).view(x.shape)


class _Linear(torch.autograd.Function):
    """y = x W̃ᵀ + b; backward dx = g W̃, dW = rule(gᵀ x), db = Σ g, as plan and transform say. Arguments: those of ``_remember``."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        ctx.save_for_backward(*_remember(ctx, *args))
        ctx.weight = args[1]  # not saved: an optimizer may step between forward and backward
        y = _fprop(*args)
        # F.linear returns a view of its 2-D result for inputs of other dimensions, and autograd refuses in-place writes to a view that a
        # Function returns: nn.ReLU(inplace=True), y /= 8, y[mask] = 0
        return y.detach() if torch.compiler.is_compiling() or y._is_view() else y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, g, ctx.saved_tensors, ctx.weight)


class _FunctionalLinear(torch.autograd.Function):
    """The same for ``torch.func``, and only used there: with ``setup_context`` torch inspects the signature at every call (16 µs)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Tensor:
        return _fprop(*args).detach()  # always: under torch.vmap _is_view() may miss a view

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


class _Constant(torch.autograd.Function):
    """y = x Wᵀ + b of a constant compressed weight; backward dx = g W, for which integers are decoded again, and db = Σ g.

    Arguments: those of ``_constant_fprop``.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        ctx.save_for_backward(*_constant_saved(ctx, *args))
        y = _constant_fprop(*args)
        return y.detach() if torch.compiler.is_compiling() or y._is_view() else y  # as in _Linear

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _constant_backward(ctx, g)


class _FunctionalConstant(torch.autograd.Function):
    """The same for ``torch.func``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Tensor:
        return _constant_fprop(*args).detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*_constant_saved(ctx, *inputs))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None,) * len(ctx.needs_input_grad) if g is None else _constant_backward(ctx, g)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        raise NMError(FORWARD_MODE)


def _constant_saved(
    ctx: Any, x: Tensor, bias: Tensor | None, values: Tensor, indices: Tensor, step: Tensor | None, pattern: Pattern,
    shape: tuple[int, int], group: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    ctx.pattern, ctx.shape, ctx.bias_dtype = pattern, shape, None if bias is None else bias.dtype
    return (values, indices, step) if ctx.needs_input_grad[0] else (None, None, None)


def _constant_fprop(
    x: Tensor,
    bias: Tensor | None,
    values: Tensor,
    indices: Tensor,
    step: Tensor | None,
    pattern: Pattern,
    shape: tuple[int, int],
    group: int,
) -> Tensor:
    b = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
    return _by_choice("fprop", x, values, indices, pattern, shape, b, step, group)


def _constant_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    if any(ctx.needs_input_grad[2:5]):
        raise NMError(f"linear_compressed has no gradient with respect to {CONSTANT}: train a SparseLinear, or detach its values.")
    dx = db = None
    with torch.no_grad():
        if ctx.needs_input_grad[0]:
            values, indices, step = ctx.saved_tensors
            if step is not None:
                values = nm_dequantize_values(values, step, ctx.pattern.kept(ctx.shape[1]), g.dtype)
            dx = _by_choice("dgrad", g, values, indices, ctx.pattern, ctx.shape)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[1]:
            db = g.reshape(-1, g.shape[-1]).sum(0).to(ctx.bias_dtype)
    return once(dx, g), once(db, g), *[None] * 6


def _remember(
    ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None,
    used: Tensor, indices: Tensor | None, back: Tensor | None, back_indices: Tensor | None, transposed: bool, pattern: Pattern | None,
    by: str, back_by: str, seed: Tensor | None, plan: GemmPlan, transform: WeightTransform | None, *extras: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Store in ``ctx`` what backward needs, and return the tensors to save for it."""
    needs = ctx.needs_input_grad
    need_x, need_w = needs[0], plan.wgrad != "none" and (needs[1] or any(needs[len(needs) - len(extras) :]))
    traits = None if transform is None else transform.traits
    ctx.straight = traits is None or not traits.own_gradient
    ctx.need_w, ctx.own_gradient = need_w, need_w and not ctx.straight
    ctx.own_dgrad = need_x and traits is not None and traits.own_dgrad
    # not saved like the others: backward advances the offset in place, also of other forward passes that wait for their backward
    ctx.seed = seed if need_w else None
    ctx.plan, ctx.transform, ctx.reads = plan, transform, () if transform is None else tuple(transform.reads)
    ctx.transposed, ctx.pattern, ctx.by, ctx.cols = transposed, pattern, back_by, x.shape[-1]
    ctx.weight_dtype = weight.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    if back is None:
        back, back_indices = used, indices
    saved = (x if need_w else None, back if need_x else None, back_indices if need_x else None, weight if ctx.own_gradient else None)
    return (*saved, *extras) if ctx.own_gradient or ctx.own_dgrad else saved


def _fprop(
    x: Tensor, weight: Tensor, bias: Tensor | None, used: Tensor, indices: Tensor | None, back: Any, back_indices: Any,
    transposed: bool, pattern: Pattern | None, by: str, back_by: str, seed: Any, plan: GemmPlan, transform: WeightTransform | None,
    *extras: Any,
) -> Tensor:  # fmt: skip
    b = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
    if indices is not None:
        assert pattern is not None
        return nm_linear(x, used, indices, pattern.n, pattern.m, x.shape[-1], b, backend=by)
    if plan.fp8 is None:
        return F.linear(x, used, b)
    sparse = transform is not None and tensor_core_pattern(transform.pattern)
    if sparse and fp8.multiplies(plan.fp8, "fprop", used.shape[0], used.shape[1], x.numel(), x):
        return fp8.linear(plan.fp8, x, used, b)
    p, q, step = fp8.operands(plan.fp8, "fprop", x, used)
    y = (F.linear(p, q) * step).to(x.dtype)
    return y if b is None else y + b


def _backward(ctx: Any, g: Tensor, saved: tuple[Any, ...], source: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of a call; their derivatives with respect to ``source``, the weight, raise."""
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
        dw = _wgrad(ctx.plan, rows, x.reshape(-1, x.shape[-1]), ctx.seed, ctx.weight_dtype).to(ctx.weight_dtype)
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
        if ctx.transposed:
            return nm_linear(g, back, indices, n, m, g.shape[-1], None, backend=ctx.by)
        return nm_linear_dgrad(g, back, indices, n, m, ctx.cols, backend=ctx.by)
    if ctx.plan.fp8 is None:
        return g.matmul(back)
    p, q, step = fp8.operands(ctx.plan.fp8, "dgrad", g, back)
    return (p.matmul(q) * step).to(g.dtype)


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
        extras: the tensors that ``transform`` reads.

    Returns:
        y ``(..., out)``.

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
    packed = (used, None, None, None, False, None, "", "") if isinstance(used, Tensor) else used
    transforming = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    kind = _FunctionalLinear if transforming and functional() else _Linear
    return kind.apply(x if x.dim() <= 2 else as_multiplied(x), weight, bias, *packed, seed, plan, transform, *extras)


def linear_compressed(x: Tensor, weight: ops.Compressed, bias: Tensor | None = None) -> Tensor:
    """Multiply by a constant compressed weight, y = x Wᵀ + b; differentiable in x and the bias.

    Args:
        x: ``(..., in)``, in any floating dtype if the weight has integers as values, else in the weight's.
        weight: W ``(out, in)``.
        bias: ``(out,)`` or None.

    Returns:
        y ``(..., out)``.

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
            return nm_linear_integers(x, weight.values, weight.indices, weight.step, p.n, p.m, x.shape[-1], b)
        if weight.step is not None:
            return _by_choice(
                "fprop", x, weight.values, weight.indices, p, (weight.shape[0], weight.shape[1]), b, weight.step, weight.group
            )
        return nm_linear(x, *operand_for(x, weight), p.n, p.m, x.shape[-1], b)
    form = [t if t is None or counts_writes(t) else t.clone() for t in (weight.values, weight.indices, weight.step)]
    # with the sizes: a graph that is compiled again for another layer has those of tensors as symbols, and the choice reads numbers
    shape = weight.shape[0], weight.shape[1]
    kind = _FunctionalConstant if functional() else _Constant
    return kind.apply(x, bias, *form, p, shape, weight.group)
