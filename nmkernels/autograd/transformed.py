"""W̃ as a node of the autograd graph, for layers that torch multiplies: convolutions and stacked experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..layouts import LINEAR, as_matrix, as_stored, ordered
from .function import functional, once, with_functional
from .transforms import WeightTransform


def _forward(functional: bool, weight: Tensor, used: Tensor, layout: str, transform: WeightTransform, *extras: Tensor) -> Tensor:
    return used.clone() if functional else used.view_as(used)  # a view, so that autograd refuses in-place writes, as to the Parameter


def _remember(
    ctx: Any, functional: bool, result: Tensor, weight: Tensor, used: Tensor, layout: str, transform: WeightTransform, *extras: Tensor
) -> tuple[Tensor, ...]:
    ctx.layout, ctx.transform, ctx.reads = layout, transform, tuple(transform.reads)
    ctx.straight, ctx.weight_dtype = not transform.traits.own_gradient, weight.dtype
    ctx.weight = None if functional else weight  # not saved: an optimizer may step between forward and backward
    return () if ctx.straight and not functional else (weight, *extras)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    with torch.no_grad():
        dw, learned = _gradients(ctx, g, *saved)
    if torch.is_grad_enabled():
        weight, extras = saved[0] if ctx.weight is None else ctx.weight, saved[1:]
        dw = once(dw, g, weight, *extras)
        learned = {name: once(d, g, weight, *extras) for name, d in learned.items()}
    return dw, None, None, None, *map(learned.get, ctx.reads)


def _gradients(ctx: Any, g: Tensor, weight: Tensor | None = None, *extras: Tensor) -> tuple[Tensor | None, dict[str, Tensor | None]]:
    g = g.to(ctx.weight_dtype)
    if ctx.straight:
        return g, {}
    assert weight is not None
    matrices = [as_matrix(ordered(t, ctx.layout), ctx.layout) for t in (g, weight)]
    matrix, learned = ctx.transform.gradient(*matrices, *extras)
    dw = None if matrix is None or not ctx.needs_input_grad[0] else as_stored(matrix, ctx.layout, g.shape)
    return dw, dict(learned)


_Transformed, _FunctionalTransformed = with_functional(_forward, _remember, _backward)


def transformed(weight: Tensor, used: Tensor, transform: WeightTransform, extras: Sequence[Tensor] = (), layout: str = LINEAR) -> Tensor:
    """Return W̃ such that its gradient reaches the master weight by the transform's rule, or unchanged if the rule is straight through.

    The result is a view of ``used``, not a copy. Works with ``torch.func``.

    Args:
        weight: the master weight, stored as ``layout`` says; it receives the gradient, in its own dtype.
        used: W̃, stored like ``weight``, in the dtype of the multiplication.
        transform: the ``WeightTransform`` that made ``used`` from ``weight``.
        extras: the tensors that ``transform`` reads.
        layout: one of ``nmkernels.layouts``.

    Returns:
        W̃, shaped like ``weight``.

    Raises:
        NMError: on a second derivative, and in forward mode.

    Example:
        >>> from nmkernels import Pattern
        >>> from nmkernels.autograd import HardMask
        >>> rule, w = HardMask(Pattern("1:2"), chain=True), torch.tensor([[1.0, -2.0]], requires_grad=True)
        >>> transformed(w, rule(w.detach()), rule).sum().backward()
        >>> w.grad
        tensor([[0., 1.]])
    """
    result: Tensor = (_FunctionalTransformed if functional() else _Transformed).apply(weight, used, layout, transform, *extras)
    return result
