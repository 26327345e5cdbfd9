"""One linear autograd Function, driven by a GemmPlan."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from ..ops.linear import linear_of_layer
from ..pattern import Pattern
from .plan import STRAIGHT_THROUGH, GemmPlan, packed_inference


class _Linear(torch.autograd.Function):
    """y = x W̃ᵀ + b forward; dx = g W̃, dW = gᵀ x, db = Σ g backward, each by its plan's rule.

    ``weight`` only receives the gradient; ``used`` is what is multiplied: W̃ in dense layout, or the values of
    its compressed form with ``indices`` beside them.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        _remember(ctx, *args)
        return _product(*args)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, used, indices, seed = ctx.saved_tensors
        plan: GemmPlan = ctx.plan
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            if indices is None:
                dx = g.matmul(used)
            else:
                dx = torch.ops.nmkernels.nm_linear_dgrad(g, used, indices, plan.n, plan.m, ctx.cols)
        if ctx.need_w:
            dw = _wgrad(plan, g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1]), seed).to(ctx.weight_dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            db = g.reshape(-1, g.shape[-1]).sum(0).to(ctx.bias_dtype)
        return dx, dw, db, None, None, None, None


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
    x: Tensor, weight: Tensor | None, bias: Tensor | None, used: Tensor, indices: Tensor | None, seed: Tensor | None, plan: GemmPlan
) -> Tensor:
    b = None if bias is None else bias.to(x.dtype)
    if indices is None:
        return F.linear(x, used, b)
    return linear_of_layer(x, used, indices, plan.n, plan.m, b)


def _remember(
    ctx: Any,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    used: Tensor,
    indices: Tensor | None,
    seed: Tensor | None,
    plan: GemmPlan,
) -> None:
    """Keep for backward what a gradient really needs, and nothing else."""
    need_x, need_w = ctx.needs_input_grad[0], ctx.needs_input_grad[1] and plan.wgrad != "none"
    ctx.save_for_backward(x if need_w else None, used if need_x else None, indices if need_x else None, seed if need_w else None)
    ctx.plan, ctx.cols, ctx.need_w = plan, x.shape[-1], need_w
    ctx.weight_dtype = None if weight is None else weight.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _wgrad(plan: GemmPlan, g: Tensor, x: Tensor, seed: Tensor | None) -> Tensor:
    """gᵀ x, dense or with gᵀ replaced by its unbiased N:M estimate along tokens."""
    if plan.wgrad == "dense":
        return g.t().matmul(x)
    if seed is None:
        seed = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=g.device)
    raw = torch.ops.nmkernels
    values, indices = raw.nm_mvue_compress(g, plan.n, plan.m, 0, seed, "exact")
    return raw.nm_linear_wgrad(values, indices, plan.n, plan.m, g.shape[0], x)


def linear(
    x: Tensor, weight: Tensor, used: Tensor, bias: Tensor | None = None, plan: GemmPlan = STRAIGHT_THROUGH, seed: Tensor | None = None
) -> Tensor:
    """y = x W̃ᵀ + b with the gradient passed straight through to the master weight.

    Forward multiplies ``used`` (W̃); backward gives ``∂L/∂x = g W̃`` and ``∂L/∂weight = gᵀ x``, unmasked, in the dtype of ``weight``
    (the straight-through estimator; SR-STE, Zhou et al. 2021, eq. 5 without its decay, which belongs after clipping).

    Args:
        x: ``(..., in)``.
        weight: the master weight ``(out, in)``; it receives the gradient and is not read.
        used: W̃ ``(out, in)`` in x's dtype.
        bias: ``(out,)``, added in x's dtype.
        plan: the rule of each GEMM; see ``GemmPlan``.
        seed: int64 ``(2,)`` (seed, offset) for ``wgrad="mvue"``; drawn from torch's generator when None.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor([[3.0, -1.0, 2.0, 0.5]]))
        >>> linear(torch.ones(1, 4), w, ops.prune(w.detach(), "2:4")).sum().backward()
        >>> w.grad
        tensor([[1., 1., 1., 1.]])
    """
    return _apply(x, weight, bias, used, None, seed, plan)


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
    return _apply(x, None, bias, weight.values, weight.indices, None, packed_inference(p.n, p.m))
