"""GemmPlan: what each of a linear layer's three GEMMs does, as data; and which forms of the effective weight they therefore read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import dispatch
from ..ops import METHODS, Compressed, DeviceCompressed, tensor_core_pattern
from ..pattern import MAX_M, BackendError, NMError, Pattern
from ..reference.layouts import COLUMNS, meta_shape, tile_of
from .fp8 import SCHEMES
from .gemms import DENSE, Gemm, choose, forms, layout_on
from .transforms import WeightTransform

FPROP = ("dense", "packed", "auto")
DGRAD = ("dense", "packed", "columns", "device", "auto")
WGRAD = ("dense", "mvue", "magnitude", "none")


@dataclass(frozen=True)
class GemmPlan:
    """Which rule each GEMM of ``y = x W̃ᵀ + b`` follows.

    Roles, with x ``(tokens, in)``, W̃ ``(out, in)`` the effective weight and g = ∂L/∂y ``(tokens, out)``:

    * ``fprop`` (nt) y = x W̃ᵀ: ``"dense"`` multiplies W̃ in dense layout, ``"packed"`` its compressed form, ``"auto"`` at every call the
      one that was measured to be faster.
    * ``dgrad`` (nn) ∂L/∂x = g W̃: ``"dense"``; ``"packed"``, the compressed form of W̃, which the kernel transposes (``nm_linear_dgrad``);
      ``"columns"``, that of W̃ᵀ, for a mask that is N:M along ``out`` too; ``"device"``, where W̃ lies in a tensor core's order ``"columns"``
      or, for another mask, ``"dense"``, elsewhere ``"packed"``; ``"auto"``, the fastest measured.
    * ``wgrad`` (tn) ∂L/∂W̃ = gᵀ x: ``"dense"``; ``"mvue"``, with the unbiased N:M estimate of gᵀ along tokens (Chmiel et al. 2023);
      ``"magnitude"``, with the N largest of each group of gᵀ along tokens, which is biased: for comparison only; ``"none"``, no weight
      gradient.

    Args:
        n, m: the pattern of the estimate, and of a packed weight that no transform has made; 0 where nothing is packed.
        method: how the estimate is drawn, ``"exact"`` (least variance) or ``"approx"`` (two draws, n = 2).
        fp8: round the operands of all three to FP8: ``"paper"`` or ``"hybrid"`` (see ``fp8.SCHEMES``); None not to.

    Raises:
        NMError: a role is given a rule that it does not have, or a packed role has no pattern.

    Example:
        >>> GemmPlan(wgrad="mvue", n=2, m=4).wgrad
        'mvue'
    """

    fprop: str = "dense"
    dgrad: str = "dense"
    wgrad: str = "dense"
    n: int = 0
    m: int = 0
    method: str = "exact"
    fp8: str | None = None

    def __post_init__(self) -> None:
        rules = ("fprop", FPROP), ("dgrad", DGRAD), ("wgrad", WGRAD), ("method", METHODS)
        for name, known in rules:
            if getattr(self, name) not in known:
                raise NMError(f"GemmPlan: {name}={getattr(self, name)!r} is unknown; choose one of {', '.join(known)}.")
        if self.fprop == "dense" != self.dgrad:
            raise NMError(
                f'GemmPlan: fprop="dense" beside dgrad={self.dgrad!r}; they read the same weight, so one that is packed for dgrad serves '
                'fprop too. Give fprop="packed", or "auto" for both to have each measured.'
            )
        if (self.fprop != "dense" or self.wgrad in ("mvue", "magnitude")) and not 1 <= self.n <= self.m <= MAX_M:
            raise NMError(f"GemmPlan: a packed operand needs a pattern, 1 <= n <= m <= {MAX_M}; got n={self.n}, m={self.m}.")
        if self.wgrad == "mvue" and self.method == "approx" and self.n != 2:
            raise NMError(f'GemmPlan: method="approx" draws exactly two elements, so it needs n = 2, not {self.n}:{self.m}; use "exact".')
        if self.fp8 is not None and (self.fp8 not in SCHEMES or self.packs):
            raise NMError(f"GemmPlan: fp8={self.fp8!r} must be None or one of {', '.join(SCHEMES)}, and the weight in dense layout.")

    @property
    def packs(self) -> bool:
        """Whether a GEMM may read a compressed form of the weight."""
        return self.fprop != "dense"

    @cached_property
    def dense_layout(self) -> GemmPlan:
        """The same with every GEMM in dense layout, which is bit for bit reproducible."""
        return replace(self, fprop="dense", dgrad="dense") if self.packs else self

    def check(self, transform: WeightTransform) -> None:
        """Raise ``NMError`` unless the weight that ``transform`` makes has what this plan multiplies."""
        if self.dgrad in ("packed", "columns") and transform.traits.own_dgrad:
            raise NMError(
                f"GemmPlan: dgrad={self.dgrad!r}, and {type(transform).__name__} has another weight for that GEMM, which is in dense "
                'layout. Use dgrad="dense".'
            )
        if self.dgrad == "columns" and not transform.traits.transposable:
            raise NMError(
                f'GemmPlan: dgrad="columns" reads Wᵀ packed, and the mask of {type(transform).__name__} is not N:M along the outputs. Use '
                'a TransposableMask, or dgrad="dense" ("packed" transposes the rows).'
            )


STRAIGHT_THROUGH = GemmPlan()
"""STE, SR-STE and STEP: the masked weight in fprop and dgrad, the dense gradient to the master weight."""

# ---- which forms of the effective weight a call reads

Form = Tensor | Compressed | DeviceCompressed
"""A weight in dense layout, or packed."""

CANONICAL = "canonical"
"""The order in which packed weights lie on disk and on a CPU; where tensor cores multiply them it is that of ``layout_on``."""

TALL = 16
"""Rows of a warp's tile in those orders; ``COLUMNS`` is its width."""


class Operands(NamedTuple):
    """The effective weight W̃ ``(out, in)`` as fprop reads it, ``weight``, and as dgrad does, ``back``, None where that is the same.

    Each in dense layout, or values and indices (or metadata) of ``pattern``. ``transposed``: ``back`` is W̃ᵀ ``(in, out)``. ``by``,
    ``back_by``: the backends whose kernels multiply; empty: whom the dispatcher takes.
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


class Reads(NamedTuple):
    """What one call reads: ``fprop`` ``"dense"`` or ``"packed"``, ``dgrad`` also ``"columns"``, W̃ᵀ packed.

    ``layout``: of what is packed. ``by``: the backends of fprop and dgrad; see ``Operands``.
    """

    fprop: str
    dgrad: str
    layout: str
    by: tuple[str, str] = ("", "")


def reads(plan: GemmPlan, transform: WeightTransform, weight: Tensor, dtype: torch.dtype, x: Tensor) -> Reads:
    """What a call with the input ``x`` reads of the weight that ``transform`` makes of ``weight``; ``dtype``: of the GEMMs."""
    fprop, dgrad, by, back_by = plan.fprop, plan.dgrad, "", ""
    columns = dgrad in ("columns", "device", "auto") and transform.traits.transposable
    layout = layout_for(weight, transform.pattern, dtype, columns)
    if fprop == "auto":
        fprop, by = _chosen(_gemm("fprop", transform, weight, dtype, layout, columns, x.numel() // weight.shape[1]))
    if dgrad == "auto" and not torch.is_grad_enabled():
        dgrad, back_by = fprop, by  # nobody will ask for it
    elif dgrad == "auto":
        dgrad, back_by = _chosen(_gemm("dgrad", transform, weight, dtype, layout, columns, x.numel() // weight.shape[1]))
    elif dgrad in ("packed", "device") and layout != CANONICAL:
        # tensor cores sum along the rows of what is packed, and dgrad sums along the columns of W̃
        dgrad = "columns" if columns else DENSE
    elif dgrad == "device":
        dgrad = DENSE if transform.traits.own_dgrad else "packed"
    return Reads(fprop, dgrad, layout, (by, back_by))


def _chosen(gemm: Gemm) -> tuple[str, str]:
    """The rule of a GEMM by measurement, and the backend whose kernel it is (empty: the dispatcher's)."""
    found = choose(gemm, measure=True)
    if found == DENSE:
        return DENSE, ""
    backend, _, form = found.rpartition(" ")
    # a graph calls the op, whose dispatcher decides when it runs
    backend = "" if torch.compiler.is_compiling() else backend
    return ("columns" if (form if backend else gemm.forms[1]).startswith("columns") else "packed"), backend


def _gemm(role: str, transform: WeightTransform, weight: Tensor, dtype: torch.dtype, layout: str, columns: bool, tokens: int) -> Gemm:
    """fprop or dgrad as ``choose`` is asked about it, with the forms of W̃ that it may read."""
    (rows, cols), p = weight.shape, transform.pattern
    ending = "" if layout == CANONICAL else f":{layout}"
    forms = [DENSE]
    if role == "fprop" or (layout == CANONICAL and not transform.traits.own_dgrad):
        forms.append(f"rows{ending}")
    if role == "dgrad" and columns:
        forms.append(f"columns{ending}")
    return Gemm(role, tokens, rows, cols, p.n, p.m, dtype, weight.device, tuple(forms), changing=True)


def wgrad_gemm(plan: GemmPlan, tokens: int, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Gemm:
    """wgrad of a weight ``(rows, cols)``, whose other operand is estimated; on a GPU also as tensor cores read it."""
    rule = plan.method if plan.wgrad == "mvue" else plan.wgrad
    made: tuple[str, ...] = (DENSE, "rows")
    if device.type != "cpu" and (plan.n, plan.m) == (2, 4):
        known = forms.__wrapped__ if torch.compiler.is_compiling() else forms  # a graph would warn of the cache
        made = known(rows, tokens, plan.n, plan.m, dtype, device)
    return Gemm("wgrad", tokens, rows, cols, plan.n, plan.m, dtype, device, made, rule)


def gemms_of(plan: GemmPlan, transform: WeightTransform, weight: Tensor, dtype: torch.dtype, tokens: int) -> tuple[Gemm, ...]:
    """The GEMMs for which a layer with this plan asks ``choose``: those of "auto"; see ``reads``."""
    columns = transform.traits.transposable and plan.dgrad == "auto"
    layout = layout_for(weight, transform.pattern, dtype, columns)
    asked = [
        _gemm(role, transform, weight, dtype, layout, columns, tokens)
        for role, rule in (("fprop", plan.fprop), ("dgrad", plan.dgrad))
        if rule == "auto"
    ]
    if plan.fprop == "auto" and plan.wgrad in ("mvue", "magnitude"):
        asked.append(wgrad_gemm(plan, tokens, weight.shape[0], weight.shape[1], dtype, weight.device))
    return tuple(gemm for gemm in asked if gemm.forms != (DENSE,))


def layout_for(weight: Tensor, pattern: Pattern, dtype: torch.dtype, columns: bool) -> str:
    """The order in which a packed weight lies: that of the tensor cores where their kernels run on its device, else the canonical one."""
    if dtype.itemsize != 2 or not tensor_core_pattern(pattern):
        return CANONICAL
    rows, cols = weight.shape
    if rows % TALL or cols % COLUMNS or (columns and (cols % TALL or rows % COLUMNS)):
        return CANONICAL
    layout = layout_on(weight.device, rows, *((cols,) if columns else ()))
    return layout if _multiplies(weight.device, dtype, layout, dispatch.forced_backend() or "") else CANONICAL


def _multiplies(device: torch.device, dtype: torch.dtype, layout: str, forced: str) -> bool:
    """Whether a kernel there, other than the reference, multiplies what lies in that order."""
    return _asked(device, dtype, layout, forced)


# tracing calls it and keeps the answer; of a function with a cache it would trace what is inside, and the dispatcher cannot be traced
_multiplies._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _asked(device: torch.device, dtype: torch.dtype, layout: str, forced: str) -> bool:
    rows, _ = tile_of(layout)
    values = torch.empty(rows, COLUMNS // 2, dtype=dtype, device=device)
    meta = torch.empty(meta_shape(rows, COLUMNS, layout), dtype=torch.int32, device=device)
    try:
        return dispatch.choose("nm_linear", values.new_empty(TALL, COLUMNS), values, meta, 2, 4, COLUMNS).backend != "reference"
    except BackendError:  # the one that is asked for by name does not
        return False
