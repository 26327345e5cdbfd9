"""The three products of a linear layer, each by its plan's rule, on plain tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops._define import plainly
from ..ops.linear import linear_of_layer
from ..pattern import NMError, Pattern
from . import fp8
from .choice import call, choose
from .choice.candidates import function
from .forms import wgrad_product
from .plan import GemmPlan


def fprop(plan: GemmPlan, x: Tensor, used: Tensor, indices: Tensor | None, pattern: Pattern | None, by: str, bias: Tensor | None) -> Tensor:
    """y = x W̃ᵀ + b ``(..., out)``, in x's dtype; ``used`` is W̃, or with ``indices`` the values of its compressed form of ``pattern``.

    Args:
        by: the backend whose kernel multiplies what is compressed; empty for the dispatcher's choice.
    """
    b = None if bias is None else bias.to(x.dtype)
    if indices is not None:
        assert pattern is not None
        if by:
            return _by(by, "nm_linear", x, used, indices, pattern.n, pattern.m, x.shape[-1], b)
        return linear_of_layer(x, used, indices, pattern.n, pattern.m, b)
    if plan.fp8 is None:
        return F.linear(x, used, b)
    p, q, step = fp8.operands(plan.fp8, "fprop", x, used)
    y = (F.linear(p, q) * step).to(x.dtype)
    return y if b is None else y + b


def dgrad(
    plan: GemmPlan, g: Tensor, used: Tensor, indices: Tensor | None, pattern: Pattern | None, by: str, turned: bool, cols: int
) -> Tensor:
    """∂L/∂x = g W̃ ``(..., in)``, in g's dtype; ``turned``: what is packed is W̃ᵀ. ``by``: see ``fprop``."""
    if indices is not None:
        assert pattern is not None
        if turned:
            return _by(by, "nm_linear", g, used, indices, pattern.n, pattern.m, g.shape[-1], None)
        return _by(by, "nm_linear_dgrad", g, used, indices, pattern.n, pattern.m, cols)
    if plan.fp8 is None:
        return g.matmul(used)
    p, q, step = fp8.operands(plan.fp8, "dgrad", g, used)
    return (p.matmul(q) * step).to(g.dtype)


def wgrad(plan: GemmPlan, g: Tensor, x: Tensor, seed: Tensor | None) -> Tensor:
    """∂L/∂W̃ = gᵀ x ``(out, in)`` of g ``(tokens, out)`` and x ``(tokens, in)``; gᵀ may first be replaced by an N:M tensor.

    Args:
        seed: int64 ``(2,)`` (seed, offset) of the estimate, whose offset is then advanced in place; None draws both from torch.
    """
    if plan.fprop == "auto" and plan.wgrad != "dense":
        product = wgrad_product(plan, g.shape[0], g.shape[1], x.shape[1], x.dtype, x.device)
        words = _words(plan, g, seed)
        dw = call(choose(product, measure=True), product, x, g, seed=words)
        _advance(words, seed)
        return dw
    if plan.wgrad == "dense":
        if plan.fp8 is None:
            return g.t().matmul(x)
        p, q, step = fp8.operands(plan.fp8, "wgrad", g, x)
        return (p.t().matmul(q) * step).to(x.dtype)
    raw = torch.ops.nmkernels
    values, indices = _largest(plan, g) if plan.wgrad == "magnitude" else _estimate(plan, g, seed)
    if plan.fp8 is None:
        return raw.nm_linear_wgrad(values, indices, plan.n, plan.m, g.shape[0], x)
    # the zeros that the estimate left out have no part in its largest magnitude
    p, q, step = fp8.operands(plan.fp8, "wgrad", values, x)
    return (raw.nm_linear_wgrad(p, indices, plan.n, plan.m, g.shape[0], q) * step).to(x.dtype)


def _estimate(plan: GemmPlan, g: Tensor, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """The unbiased estimate of gᵀ along tokens, compressed."""
    words = _words(plan, g, seed)
    values, indices = torch.ops.nmkernels.nm_mvue_compress(g, plan.n, plan.m, 0, words, plan.method)
    _advance(words, seed)
    return values, indices


def _words(plan: GemmPlan, g: Tensor, seed: Tensor | None) -> Tensor | None:
    """The seed and offset of an estimate; None where nothing is drawn."""
    if plan.wgrad != "mvue":
        return None
    if seed is not None and torch._C._are_functorch_transforms_active():
        raise NMError(
            "linear: the gradient of the weight is an estimate that advances the layer's seed, which torch.func does not let a backward "
            "pass do. Set layer.seed = None for numbers from torch's generator, with randomness='different' under torch.vmap."
        )
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=g.device) if seed is None else seed


def _advance(words: Tensor | None, seed: Tensor | None) -> None:
    if words is not None and seed is not None:
        # on the device, so that a replayed graph draws anew
        seed[1:].add_(1)


def _by(backend: str, op: str, *args: Any) -> Tensor:
    """``op(*args)`` by the kernel of ``backend``, or where it declines, or none is named, by whom the dispatcher takes."""
    fn = function(op, backend, args) if backend else None
    return getattr(torch.ops.nmkernels, op)(*args) if fn is None else plainly(fn, *args)


def _largest(plan: GemmPlan, g: Tensor) -> tuple[Tensor, Tensor]:
    """The N largest magnitudes of each group of gᵀ along tokens, compressed; the last group is filled up with zeros."""
    turned = F.pad(g.t(), (0, -g.shape[0] % plan.m)).contiguous()
    values, indices = torch.ops.nmkernels.nm_compress(turned, plan.n, plan.m, None)
    return values, indices
