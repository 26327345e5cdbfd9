"""Which forms of the weight used the products of a layer read: W̃ in dense layout, W̃ packed, W̃ᵀ packed, and in what order these lie."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import Compressed, DeviceCompressed
from ..ops.linear import positions
from ..pattern import Pattern
from .plan import GemmPlan
from .transforms import WeightTransform

Form = Tensor | Compressed | DeviceCompressed
"""A weight in dense layout, or packed."""


class Operands(NamedTuple):
    """The weight used, as fprop reads it and as dgrad does.

    Args:
        fprop: W̃ ``(out, in)``.
        dgrad: where it is another form, W̃ ``(out, in)``, or W̃ᵀ ``(in, out)`` if ``turned``.
        turned: see there.
    """

    fprop: Form
    dgrad: Form | None = None
    turned: bool = False

    @property
    def pattern(self) -> Pattern | None:
        """N:M of what is packed, None where nothing is."""
        return next((form.pattern for form in (self.fprop, self.dgrad) if not (form is None or isinstance(form, Tensor))), None)


class Reads(NamedTuple):
    """What one call reads: ``fprop`` ``"dense"`` or ``"packed"``, ``dgrad`` also ``"columns"``; ``layout`` of what is packed."""

    fprop: str
    dgrad: str
    layout: str

    @property
    def dense(self) -> bool:
        """W̃ in dense layout is read."""
        return "dense" in (self.fprop, self.dgrad)

    @property
    def rows(self) -> bool:
        """W̃ packed is read."""
        return "packed" in (self.fprop, self.dgrad)

    @property
    def columns(self) -> bool:
        """W̃ᵀ packed is read."""
        return self.dgrad == "columns"


def reads(plan: GemmPlan, transform: WeightTransform, weight: Tensor, dtype: torch.dtype, x: Tensor) -> Reads:
    """What a call with the input ``x`` reads of the weight that ``transform`` makes of ``weight``.

    Args:
        weight: the master weight ``(out, in)``; its shape and device decide the layout.
        dtype: of the products.
    """
    columns = transform.transposable and plan.dgrad in ("columns", "device", "auto")
    layout = layout_of(weight, transform.pattern, dtype, columns)
    dgrad = plan.dgrad
    if dgrad in ("packed", "device") and layout != "canonical":
        # tensor cores sum along the rows of what is packed, and dgrad sums along the columns of W̃
        dgrad = "columns" if columns else "dense"
    elif dgrad == "device":
        dgrad = "packed" if transform.symmetric else "dense"
    return Reads(plan.fprop, dgrad, layout)


def layout_of(weight: Tensor, pattern: Pattern, dtype: torch.dtype, columns: bool) -> str:
    """The order in which a packed weight lies: that of the tensor cores where their kernels run on its device, else the canonical one.

    Args:
        weight: ``(out, in)``. columns: Wᵀ is packed too.
    """
    return "canonical"


def parts(form: Form | None) -> tuple[Tensor | None, Tensor | None]:
    """The tensors of a form: W̃ and None, or values and indices (or metadata)."""
    return (form, None) if form is None or isinstance(form, Tensor) else (form.values, positions(form))
