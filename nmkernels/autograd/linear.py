"""One linear autograd Function, driven by a GemmPlan and a weight transform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..ops.linear import linear_of_layer
from ..pattern import Pattern
from . import products
from .forms import Operands, parts
from .plan import STRAIGHT_THROUGH, GemmPlan, packed_inference
from .transforms import WeightTransform

REST = 11
"""Arguments of the Function between the bias and the transform's extras; none has a gradient."""


class _Linear(torch.autograd.Function):
    """y = x W̃ᵀ + b forward; dx = g W̃, dW = rule(gᵀ x), db = Σ g backward, each by its plan and transform.

    ``weight`` only receives the gradient. Multiplied is ``used`` forward and ``back`` backward: W̃ in dense layout, or the values of its
    compressed form with the indices, ``places``, beside them; ``turned``: those of W̃ᵀ.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        _remember(ctx, *args)
        return _product(*args)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, used, indices, weight, *extras = ctx.saved_tensors
        plan: GemmPlan = ctx.plan
        dx = dw = db = None
        learned: dict[str, Tensor] = {}
        if ctx.needs_input_grad[0]:
            used = ctx.transform.for_dgrad(used, *extras) if ctx.own else used
            dx = products.dgrad(plan, g, used, indices, ctx.pattern, ctx.by, ctx.turned, ctx.cols)
        if ctx.need_w:
            dw = products.wgrad(plan, g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1]), ctx.seed).to(ctx.weight_dtype)
            if weight is not None:
                transform: WeightTransform = ctx.transform
                learned = dict(zip(transform.learns, transform.learn(dw, weight, *extras), strict=True))
                dw = transform.gradient(dw, weight, *extras) if ctx.needs_input_grad[1] else None
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            db = g.reshape(-1, g.shape[-1]).sum(0).to(ctx.bias_dtype)
        return dx, dw, db, *[None] * REST, *[learned.get(name) for name in ctx.reads]


class _FunctionalLinear(_Linear):
    """The same for ``torch.func``, which insists on a separate ``setup_context``.

    Only there: torch then inspects the signature at every call, 16 µs (AMD EPYC, 2026-11).
    """

    @staticmethod
    def forward(*args: Any) -> Tensor:
        return _product(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _remember(ctx, *inputs)


def _apply(*args: Any) -> Tensor:
    functional = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    return (_FunctionalLinear if functional else _Linear).apply(*args)


def _product(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, used: Tensor, places: Tensor | None, back: Any, back_places: Any, turned: bool,
    pattern: Pattern | None, by: str, back_by: str, seed: Any, plan: GemmPlan, *rest: Any,
) -> Tensor:  # fmt: skip
    return products.fprop(plan, x, used, places, pattern, by, bias)


def _remember(
    ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    used: Tensor, places: Tensor | None, back: Tensor | None, back_places: Tensor | None, turned: bool, pattern: Pattern | None,
    by: str, back_by: str, seed: Tensor | None, plan: GemmPlan, transform: WeightTransform | None, *extras: Tensor,
) -> None:  # fmt: skip
    """Keep for backward what a gradient really needs, and nothing else."""
    first = len(ctx.needs_input_grad) - len(extras)
    need_x = ctx.needs_input_grad[0]
    need_w = (ctx.needs_input_grad[1] or any(ctx.needs_input_grad[first:])) and plan.wgrad != "none"
    chain = need_w and transform is not None and not (transform.straight and not transform.learns)
    if back is None:
        back, back_places = used, places
    own = need_x and transform is not None and not transform.symmetric
    saved = (x if need_w else None, back if need_x else None, back_places if need_x else None, weight if chain else None)
    ctx.save_for_backward(*saved, *(extras if chain or own else ()))
    # not saved like the others: backward itself advances the offset, also that of a forward pass still to come back
    ctx.seed = seed if need_w else None
    ctx.plan, ctx.transform, ctx.cols, ctx.need_w, ctx.own = plan, transform, x.shape[-1], need_w, own
    ctx.turned, ctx.pattern, ctx.by = turned, pattern, back_by
    ctx.reads = () if transform is None else transform.reads
    ctx.weight_dtype = None if weight is None else weight.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


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

    Args:
        x: ``(..., in)``.
        weight: the master weight ``(out, in)``; it receives the gradient and is read only by a rule that is not straight through.
        used: W̃ ``(out, in)`` in x's dtype and dense layout, or ``Operands`` where a product reads a packed form.
        bias: ``(out,)``, added in x's dtype.
        plan: the rule of each GEMM; see ``GemmPlan``.
        seed: int64 ``(2,)`` (seed, offset) for ``wgrad="mvue"``; backward advances the offset by one, in place, on the device. With None
            both are drawn from torch's generator.
        transform: what made ``used`` from ``weight``, with the ``extras`` that it read; see ``WeightTransform``.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor([[3.0, -1.0, 2.0, 0.5]]))
        >>> linear(torch.ones(1, 4), w, ops.prune(w.detach(), "2:4")).sum().backward()
        >>> w.grad
        tensor([[1., 1., 1., 1.]])
    """
    if isinstance(used, Tensor):
        return _apply(x, weight, bias, used, None, None, None, False, None, "", "", seed, plan, transform, *extras)
    forms = *parts(used.fprop), *parts(used.dgrad)
    return _apply(x, weight, bias, *forms, used.turned, used.pattern, *used.by, seed, plan, transform, *extras)


def linear_compressed(x: Tensor, weight: ops.Compressed, bias: Tensor | None = None) -> Tensor:
    """y = x Wᵀ + b from the compressed form, differentiable in x and in the bias.

    Args:
        x: ``(..., in)``, in the dtype of ``weight``.
        weight: the compressed weight of shape ``(out, in)``; it is a constant here.
        bias: ``(out,)``.
    """
    p: Pattern = weight.pattern
    if not torch.is_grad_enabled():
        b = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
        return linear_of_layer(x, weight.values, weight.indices, p.n, p.m, b)
    form = weight.values, weight.indices
    return _apply(x, None, bias, *form, None, None, False, p, "", "", None, packed_inference(p.n, p.m), None)
