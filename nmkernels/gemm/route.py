"""Routes of a layer's calls: the forms of its weight that a kind of call reads, and the backends that multiply them.

The kernel itself is cached by the op, keyed by everything that its contract and the backends check (``ops.define``), so an invalid call
still raises on a layer that has a route for a valid one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import Compressed, DeviceCompressed
from ..pattern import Pattern
from .choose import Routes as Routes  # where pickles of earlier versions look for it
from .choose import choose
from .forms import CANONICAL, forms, layout_for, multiplies
from .methods import DENSE, Method
from .plan import GemmPlan
from .problem import Problem

Form = Tensor | Compressed | DeviceCompressed
"""A weight in dense layout, or packed."""


class Operands(NamedTuple):
    """The effective weight W̃ ``(out, in)`` in the forms that fprop and dgrad read.

    Args:
        weight, indices: W̃ for fprop, in dense layout, or its values with indices or metadata.
        back, back_indices: the same for dgrad; None if it reads what fprop reads.
        transposed: whether ``back`` is W̃ᵀ ``(in, out)``.
        pattern: of the packed forms.
        backend, back_backend: of fprop and dgrad; empty for the dispatcher's choice.
    """

    weight: Tensor
    indices: Tensor | None = None
    back: Tensor | None = None
    back_indices: Tensor | None = None
    transposed: bool = False
    pattern: Pattern | None = None
    backend: str = ""
    back_backend: str = ""


def operands(fprop: Form, dgrad: Form | None = None, transposed: bool = False, backends: tuple[str, str] = ("", "")) -> Operands:
    """Operands from the form that fprop reads and the one that dgrad reads (None if it is the same)."""
    pattern: Pattern | None = None
    parts: list[Any] = []
    for form in (fprop, dgrad):
        if form is None or isinstance(form, Tensor):
            parts += form, None
        else:
            pattern = form.pattern
            parts += form.values, form.indices if isinstance(form, Compressed) else form.meta
    weight, indices, back, back_indices = parts
    return Operands(weight, indices, back, back_indices, transposed, pattern, *backends)


class Route(NamedTuple):
    """The forms of the effective weight that one call reads.

    Args:
        fprop: ``"dense"`` or ``"packed"``.
        dgrad: ``"dense"``, ``"packed"``, or ``"columns"`` for W̃ᵀ packed.
        layout: the layout of packed forms.
        backends: of fprop and dgrad, as in ``Operands``.
    """

    fprop: str
    dgrad: str
    layout: str
    backends: tuple[str, str] = ("", "")


def route(plan: GemmPlan, transform: Any, weight: Tensor, dtype: torch.dtype, x: Tensor) -> Route:
    """Choose the forms of W̃ that a call with the input ``x`` reads.

    Args:
        transform: the ``WeightTransform`` that makes W̃ from ``weight``.
        dtype: of the GEMMs.
    """
    shape, device = (weight.shape[0], weight.shape[1]), weight.device
    columns = plan.dgrad in ("columns", "device", "auto") and transform.traits.transposable
    layout = layout_for(shape, device, transform.pattern, dtype, columns)
    pair = _pair(transform, shape, device, dtype, layout, x.numel() // weight.shape[1])
    if plan.fprop == "auto":
        # without grad there is no backward pass, so dgrad is not needed
        chosen = [_reads(method) for method in choose(*pair[: 2 if torch.is_grad_enabled() else 1])]
        (fprop, backend), (dgrad, back_backend) = chosen[0], chosen[-1]
        return Route(fprop, dgrad, layout, (backend, back_backend))
    dgrad = _dgrad(plan, transform, layout)
    if plan.fprop == "dense":
        return Route("dense", dgrad, layout)
    kernels = [_reads(choose(p)[0])[1] for p in _packed(dgrad, layout, *pair)]
    return Route("packed", dgrad, layout, (kernels[0], kernels[1] if len(kernels) > 1 else ""))


def _dgrad(plan: GemmPlan, transform: Any, layout: str) -> str:
    """The form that dgrad reads, for a plan that fixes it."""
    if plan.dgrad in ("packed", "device") and layout != CANONICAL:
        # tensor cores sum along the rows of what is packed, and dgrad sums along the columns of W̃
        return "columns" if plan.dgrad == "device" and transform.traits.transposable else "dense"
    if plan.dgrad == "device":
        return "dense" if transform.traits.own_dgrad else "packed"
    return plan.dgrad


def _reads(method: Method) -> tuple[str, str]:
    """The form that a method reads, and its backend; none in a compiled graph, where the op's dispatcher chooses at run time."""
    if method == DENSE:
        return "dense", ""
    return "columns" if method.form.startswith("columns") else "packed", "" if torch.compiler.is_compiling() else method.backend


def _pair(
    transform: Any, shape: tuple[int, int], device: torch.device, dtype: torch.dtype, layout: str, tokens: int
) -> tuple[Problem, Problem]:
    """The problems of fprop and dgrad, with the forms of W̃ that each may read."""
    p, traits = transform.pattern, transform.traits
    ending = "" if layout == CANONICAL else f":{layout}"
    first, back = ("dense", f"rows{ending}"), ["dense"]
    if layout == CANONICAL and not traits.own_dgrad:
        back.append("rows")
    if traits.transposable:
        back.append(f"columns{ending}")
    sizes = tokens, *shape, p.n, p.m, dtype, device
    return Problem("fprop", *sizes, first, changing=True), Problem("dgrad", *sizes, tuple(back), changing=True)


def _packed(dgrad: str, layout: str, fprop: Problem, back: Problem) -> list[Problem]:
    """The problems of fprop, and of dgrad unless it is dense, for a plan that fixes the forms, so that only the kernel is chosen."""
    ending = "" if layout == CANONICAL else f":{layout}"
    problems = [fprop._replace(forms=(f"rows{ending}",), changing=False)]
    if dgrad != "dense":
        problems.append(back._replace(forms=(f"{'columns' if dgrad == 'columns' else 'rows'}{ending}",), changing=False))
    return problems


def wgrad_problem(plan: GemmPlan, tokens: int, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Problem:
    """The problem of wgrad with an estimate of gᵀ, for a weight ``(rows, cols)``; on a GPU in tensor-core layouts too."""
    rule = plan.method if plan.wgrad == "mvue" else plan.wgrad
    available: tuple[str, ...] = ("dense", "rows")
    if device.type != "cpu" and (plan.n, plan.m) == (2, 4):
        forms_of = forms.__wrapped__ if torch.compiler.is_compiling() else forms  # tracing warns about lru_cache
        available = forms_of(rows, tokens, plan.n, plan.m, dtype, device)
        layout = available[-1].partition(":")[2]
        if layout and not multiplies(device, dtype, layout):
            available = available[:-1]
    return Problem("wgrad", tokens, rows, cols, plan.n, plan.m, dtype, device, available, rule)


def problems_of(
    plan: GemmPlan, transform: Any, shape: tuple[int, int], device: torch.device, dtype: torch.dtype, tokens: int
) -> list[tuple[Problem, ...]]:
    """The GEMMs of a layer with this plan that ``choose`` decides, grouped by joint choice."""
    if plan.fprop == "dense":
        return []
    layout = layout_for(shape, device, transform.pattern, dtype, plan.dgrad != "packed" and transform.traits.transposable)
    pair = _pair(transform, shape, device, dtype, layout, tokens)
    if plan.fprop == "packed":
        return [(p,) for p in _packed(_dgrad(plan, transform, layout), layout, *pair)]
    problems: list[tuple[Problem, ...]] = [pair]
    if plan.wgrad in ("mvue", "magnitude"):
        problems.append((wgrad_problem(plan, tokens, *shape, dtype, device),))
    return problems
