"""Route: what one kind of call reads of a layer's weight, and by whose kernels; found once and then remembered by the layer.

The kernel itself is remembered by the op, under all that its contract and the backends look at (``ops.define``): a call that has to be
refused is refused on a layer that has a route for the good one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import Compressed, DeviceCompressed
from ..pattern import Pattern
from .choose import choose
from .forms import CANONICAL, forms, layout_for
from .methods import DENSE, Method
from .plan import GemmPlan
from .problem import Problem

Form = Tensor | Compressed | DeviceCompressed
"""A weight in dense layout, or packed."""


class Operands(NamedTuple):
    """The effective weight W̃ ``(out, in)`` as fprop reads it, ``weight``, and as dgrad does, ``back``, None where that is the same.

    Each in dense layout, or values and indices (or metadata) of ``pattern``. ``transposed``: ``back`` is W̃ᵀ ``(in, out)``. ``by``,
    ``back_by``: the backends whose kernels multiply; empty: the dispatcher's choice.
    """

    weight: Tensor
    indices: Tensor | None = None
    back: Tensor | None = None
    back_indices: Tensor | None = None
    transposed: bool = False
    pattern: Pattern | None = None
    by: str = ""
    back_by: str = ""


def operands(fprop: Form, dgrad: Form | None = None, transposed: bool = False, by: tuple[str, str] = ("", "")) -> Operands:
    """The operands of two forms of the effective weight; ``dgrad``: None where it reads what fprop does."""
    pattern: Pattern | None = None
    parts: list[Any] = []
    for form in (fprop, dgrad):
        if form is None or isinstance(form, Tensor):
            parts += form, None
        else:
            pattern = form.pattern
            parts += form.values, form.indices if isinstance(form, Compressed) else form.meta
    weight, indices, back, back_indices = parts
    return Operands(weight, indices, back, back_indices, transposed, pattern, *by)


class Route(NamedTuple):
    """What one call reads of the effective weight.

    Args:
        fprop: ``"dense"`` or ``"packed"``.
        dgrad: the same, or ``"columns"``, W̃ᵀ packed.
        layout: the order of what is packed.
        by: the backends of fprop and dgrad; see ``Operands``.
    """

    fprop: str
    dgrad: str
    layout: str
    by: tuple[str, str] = ("", "")


def route(plan: GemmPlan, transform: Any, weight: Tensor, dtype: torch.dtype, x: Tensor) -> Route:
    """What a call with the input ``x`` reads of the W̃ that ``transform``, a ``WeightTransform``, makes of ``weight``.

    ``dtype``: of the GEMMs.
    """
    columns = plan.dgrad in ("columns", "device", "auto") and transform.traits.transposable
    layout = layout_for(weight, transform.pattern, dtype, columns)
    if plan.fprop == "auto":
        # without grad there is no backward pass, so dgrad is not needed
        problems = _pair(transform, weight, dtype, layout, x.numel() // weight.shape[1])[: 2 if torch.is_grad_enabled() else 1]
        chosen = [_reads(method) for method in choose(*problems)]
        (fprop, by), (dgrad, back_by) = chosen[0], chosen[-1]
        return Route(fprop, dgrad, layout, (by, back_by))
    dgrad = plan.dgrad
    if dgrad in ("packed", "device") and layout != CANONICAL:
        # tensor cores sum along the rows of what is packed, and dgrad sums along the columns of W̃
        dgrad = "columns" if columns else "dense"
    elif dgrad == "device":
        dgrad = "dense" if transform.traits.own_dgrad else "packed"
    if plan.fprop == "dense":
        return Route("dense", dgrad, layout)
    kernels = [_reads(choose(p)[0])[1] for p in _packed(dgrad, transform, weight, dtype, layout, x.numel() // weight.shape[1])]
    return Route("packed", dgrad, layout, (kernels[0], kernels[1] if len(kernels) > 1 else ""))


def _reads(method: Method) -> tuple[str, str]:
    """What a method reads, and whose kernel it is; a graph calls the op, whose dispatcher decides when it runs."""
    if method == DENSE:
        return "dense", ""
    return "columns" if method.form.startswith("columns") else "packed", "" if torch.compiler.is_compiling() else method.backend


def _pair(transform: Any, weight: Tensor, dtype: torch.dtype, layout: str, tokens: int) -> tuple[Problem, Problem]:
    """fprop and dgrad, with the forms of W̃ that each may read."""
    (rows, cols), p, traits = weight.shape, transform.pattern, transform.traits
    ending = "" if layout == CANONICAL else f":{layout}"
    first, back = ("dense", f"rows{ending}"), ["dense"]
    if layout == CANONICAL and not traits.own_dgrad:
        back.append("rows")
    if traits.transposable:
        back.append(f"columns{ending}")
    sizes = tokens, rows, cols, p.n, p.m, dtype, weight.device
    return Problem("fprop", *sizes, first, changing=True), Problem("dgrad", *sizes, tuple(back), changing=True)


def _packed(dgrad: str, transform: Any, weight: Tensor, dtype: torch.dtype, layout: str, tokens: int) -> list[Problem]:
    """fprop, and dgrad unless it is dense, of a plan that says which form each reads: only the kernel is left open."""
    ending = "" if layout == CANONICAL else f":{layout}"
    fprop, back = _pair(transform, weight, dtype, layout, tokens)
    found = [fprop._replace(forms=(f"rows{ending}",), changing=False)]
    if dgrad != "dense":
        found.append(back._replace(forms=(f"{'columns' if dgrad == 'columns' else 'rows'}{ending}",), changing=False))
    return found


def wgrad_problem(plan: GemmPlan, tokens: int, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Problem:
    """wgrad of a weight ``(rows, cols)``, whose other operand is estimated; on a GPU also as tensor cores read it."""
    rule = plan.method if plan.wgrad == "mvue" else plan.wgrad
    made: tuple[str, ...] = ("dense", "rows")
    if device.type != "cpu" and (plan.n, plan.m) == (2, 4):
        known = forms.__wrapped__ if torch.compiler.is_compiling() else forms  # a graph would warn of the cache
        made = known(rows, tokens, plan.n, plan.m, dtype, device)
    return Problem("wgrad", tokens, rows, cols, plan.n, plan.m, dtype, device, made, rule)


def problems_of(plan: GemmPlan, transform: Any, weight: Tensor, dtype: torch.dtype, tokens: int) -> list[tuple[Problem, ...]]:
    """The GEMMs that a layer with this plan leaves to ``choose``: those that are chosen together stand together."""
    if plan.fprop == "dense":
        return []
    layout = layout_for(weight, transform.pattern, dtype, plan.dgrad != "packed" and transform.traits.transposable)
    if plan.fprop == "packed":
        dgrad = route(plan, transform, weight, dtype, weight.new_empty(tokens, weight.shape[1], device="meta")).dgrad
        return [(p,) for p in _packed(dgrad, transform, weight, dtype, layout, tokens)]
    found: list[tuple[Problem, ...]] = [_pair(transform, weight, dtype, layout, tokens)]
    if plan.wgrad in ("mvue", "magnitude"):
        found.append((wgrad_problem(plan, tokens, weight.shape[0], weight.shape[1], dtype, weight.device),))
    return found
