"""W̃ as a node of the autograd graph, for layers that torch multiplies: convolutions and stacked experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..layouts import LINEAR, as_matrix, as_stored, ordered
from ..pattern import NMError
from .linear import FORWARD_MODE, functional, once
from .transforms import WeightTransform


class _Transformed(torch.autograd.Function):
    """Forward W̃, backward the rule of its transform. Arguments: weight, W̃, layout, transform, and the tensors that the transform reads."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, used: Tensor, *rest: Any) -> Tensor:
        ctx.save_for_backward(*_remember(ctx, weight, used, *rest))
        ctx.weight = weight  # not saved: an optimizer may step between forward and backward
        return used.view_as(used)  # a view, so that autograd refuses in-place writes to it, as to the Parameter

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, g, ctx.saved_tensors, ctx.weight)


class _FunctionalTransformed(torch.autograd.Function):
    """The same for ``torch.func``; slower, like ``linear``'s."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, used: Tensor, *rest: Any) -> Tensor:
        return used.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _remember(ctx, *inputs)
        ctx.save_for_backward(inputs[0], *inputs[4:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        return (None,) * len(ctx.needs_input_grad) if g is None else _backward(ctx, g, saved, saved[0])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NMError(FORWARD_MODE)


def _remember(ctx: Any, weight: Tensor, used: Tensor, layout: str, transform: WeightTransform, *extras: Tensor) -> tuple[Tensor, ...]:
    """Note what backward has to know; returned are the tensors that it needs."""
    ctx.layout, ctx.transform, ctx.reads = layout, transform, tuple(transform.reads)
    ctx.straight, ctx.weight_dtype = not transform.traits.own_gradient, weight.dtype
    return () if ctx.straight else (weight, *extras)


def _backward(ctx: Any, g: Tensor, saved: tuple[Tensor, ...], source: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of a call; their derivatives with respect to ``source``, the weight, raise."""
    with torch.no_grad():
        dw, learned = _gradients(ctx, g, *saved)
    if torch.is_grad_enabled():
        extras = saved[1:]
        dw = once(dw, g, source, *extras)
        learned = {name: once(d, g, source, *extras) for name, d in learned.items()}
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
    kind = _FunctionalTransformed if functional() else _Transformed
    result: Tensor = kind.apply(weight, used, layout, transform, *extras)
    return result
