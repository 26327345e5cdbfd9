"""One linear autograd Function, driven by a GemmPlan and a weight transform.

The three products of a linear layer, each by its plan's rule, on plain tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from .. import ops
from ..ops.compress import counts_writes
from ..ops.define import plainly
from ..ops.linear import linear_of_layer
from ..pattern import NMError, Pattern
from . import fp8
from .choice import call, choose
from .choice.candidates import function
from .forms import Operands, parts, wgrad_product
from .functional import functional, once
from .plan import STRAIGHT_THROUGH, GemmPlan, packed_inference
from .transforms import WeightTransform


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


BEFORE, USED = 7, 3
"""How many arguments of the Function stand before ``ctx.rest``, none of which has a gradient; and which of them W̃ is."""

CONSTANT = "the compressed weight, which is a constant"


class _Linear(torch.autograd.Function):
    """y = x W̃ᵀ + b forward; dx = g W̃, dW = rule(gᵀ x), db = Σ g backward, each by its plan and transform.

    ``weight`` only receives the gradient. Multiplied is ``used`` forward and ``back`` backward: W̃ in dense layout, or the values of its
    compressed form with the indices, ``places``, beside them; ``transposed``: those of W̃ᵀ.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        ctx.save_for_backward(*_remember(ctx, *args))
        ctx.weight = args[1]  # not saved: an optimizer may step between forward and backward
        return _product(*args)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, g, ctx.weight)


class _FunctionalLinear(torch.autograd.Function):
    """The same for ``torch.func`` and forward mode: y' = x' W̃ᵀ + x W'ᵀ + b', for which the gradient of W must go straight through.

    Only there: for ``setup_context`` torch inspects the signature at every call, 16 µs (AMD EPYC, 2026-11), and a graph takes no ``jvp``.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Tensor:
        return _product(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _remember(ctx, *inputs)
        x, weight, _, used, places, back, back_places = inputs[:BEFORE]
        back, back_places = (used, places) if back is None else (back, back_places)
        saved = x, back, back_places, weight, *inputs[BEFORE + len(ctx.rest) :], used, places
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        ctx.set_materialize_grads(False)  # what has no tangent shall cost none

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * (BEFORE + len(ctx.rest) + len(ctx.reads))
        return _backward(ctx, g, ctx.saved_tensors[3])

    @staticmethod
    def jvp(ctx: Any, x_t: Tensor | None, w_t: Tensor | None, b_t: Tensor | None, *others: Tensor | None) -> Tensor:
        exact = (ctx.transform is None or not ctx.transform.traits.own_gradient) and ctx.plan.wgrad == "dense" and ctx.plan.fp8 is None
        if any(t is not None for t in others) or (w_t is not None and not exact):
            raise NMError(
                "linear has a derivative in forward mode by its input and its bias, and by its weight where the gradient of that goes "
                f"straight through: not by {CONSTANT}, by a weight whose gradient follows another rule, or by what such a rule reads. "
                "Give that no tangent, or differentiate backward."
            )
        # torch has switched forward mode off, also for an outer transform that takes the derivative of this one
        with forward_ad._set_fwd_grad_enabled(True):
            primals = [None if t is None else torch._VF._unpack_dual(t, level=0)[0] for t in ctx.saved_tensors]
            return _tangent(primals, ctx.rest, x_t, w_t, b_t)


def _tangent(saved: list[Any], rest: tuple[Any, ...], x_t: Tensor | None, w_t: Tensor | None, b_t: Tensor | None) -> Tensor:
    x, back, back_places, weight, *extras, used, places = saved
    terms = []
    if x_t is not None:
        terms.append(_apply(x_t, weight, None, used, places, back, back_places, *rest, *extras))
    if w_t is not None:
        terms.append(F.linear(x, w_t.to(x.dtype)))
    if b_t is not None:
        terms.append(b_t.to(x.dtype).expand(*x.shape[:-1], -1))
    return sum(terms[1:], terms[0])


def _apply(*args: Any) -> Tensor:
    return (_FunctionalLinear if functional() else _Linear).apply(*args)


def _product(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, used: Tensor, places: Tensor | None, back: Any, back_places: Any,
    transposed: bool, pattern: Pattern | None, by: str, back_by: str, seed: Any, plan: GemmPlan, *rest: Any,
) -> Tensor:  # fmt: skip
    return fprop(plan, x, used, places, pattern, by, bias)


def _remember(
    ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    used: Tensor, places: Tensor | None, back: Tensor | None, back_places: Tensor | None, transposed: bool, pattern: Pattern | None,
    by: str, back_by: str, seed: Tensor | None, plan: GemmPlan, transform: WeightTransform | None, *extras: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Note what backward has to know; returned are the tensors that it really needs, for a gradient that is wanted."""
    first = len(ctx.needs_input_grad) - len(extras)
    need_x = ctx.needs_input_grad[0]
    need_w = (ctx.needs_input_grad[1] or any(ctx.needs_input_grad[first:])) and plan.wgrad != "none"
    chain = need_w and transform is not None and transform.traits.own_gradient
    if back is None:
        back, back_places = used, places
    own = need_x and transform is not None and transform.traits.own_dgrad
    # not saved like the others: backward itself advances the offset, also that of a forward pass still to come back
    ctx.seed = seed if need_w else None
    ctx.plan, ctx.transform, ctx.cols, ctx.need_w, ctx.own = plan, transform, x.shape[-1], need_w, own
    ctx.transposed, ctx.pattern, ctx.by = transposed, pattern, back_by
    ctx.reads = () if transform is None else tuple(transform.reads)
    ctx.weight_dtype = None if weight is None else weight.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.rest = transposed, pattern, by, back_by, seed, plan, transform
    saved = (x if need_w else None, back if need_x else None, back_places if need_x else None, weight if chain else None)
    return (*saved, *(extras if chain or own else ()))


def _backward(ctx: Any, g: Tensor, source: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of a call. ``source``: the weight, by which their own derivatives are refused too."""
    if source is None and ctx.needs_input_grad[USED]:
        raise NMError(f"linear_compressed has no gradient by {CONSTANT}: train a SparseLinear, or detach its values.")
    if not torch.is_grad_enabled():
        dx, dw, db, learned = _gradients(ctx, g)
    else:
        with torch.no_grad():
            dx, dw, db, learned = _gradients(ctx, g)
        x, _, _, _, *extras = ctx.saved_tensors
        dx, db = once(dx, g, source, *extras), once(db, g)
        dw = once(dw, g, x, source, *extras)
        learned = {name: once(d, g, x, source, *extras) for name, d in learned.items()}
    return dx, dw, db, *[None] * (BEFORE - USED + len(ctx.rest)), *[learned.get(name) for name in ctx.reads]


def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, dict[str, Tensor | None]]:
    """dx, dW, db and the gradients of what the transform learns, by name, each where it is wanted."""
    x, used, indices, weight, *extras = ctx.saved_tensors
    extras = extras[: len(ctx.reads)]
    transform = ctx.transform
    dx = dw = db = None
    learned: dict[str, Tensor | None] = {}
    if ctx.needs_input_grad[0]:
        used = transform.for_dgrad(used, *extras) if ctx.own else used
        dx = dgrad(ctx.plan, g, used, indices, ctx.pattern, ctx.by, ctx.transposed, ctx.cols)
    if ctx.need_w:
        dw = wgrad(ctx.plan, g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1]), ctx.seed).to(ctx.weight_dtype)
        if transform is not None and transform.traits.own_gradient:
            dw, learned = transform.gradient(dw, weight, *extras)
        if not ctx.needs_input_grad[1]:
            dw = None
    if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
        db = g.reshape(-1, g.shape[-1]).sum(0).to(ctx.bias_dtype)
    return dx, dw, db, learned


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

    ``torch.func`` knows it: ``vmap``, ``grad`` and ``vmap(grad)`` (per-sample gradients, ensembles), and forward mode, the tangent
    x' W̃ᵀ + x W'ᵀ + b', by the weight only where its gradient goes straight through. A second derivative raises ``NMError``. In a function
    that ``torch.compile`` compiles together with ``torch.func`` it runs eagerly.

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
    if not torch.is_grad_enabled() and forward_ad._current_level < 0:
        b = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
        return linear_of_layer(x, weight.values, weight.indices, p.n, p.m, b)
    form = [t if counts_writes(t) else t.clone() for t in (weight.values, weight.indices)]
    return _apply(x, None, bias, *form, None, None, False, p, "", "", None, packed_inference(p.n, p.m), None)
