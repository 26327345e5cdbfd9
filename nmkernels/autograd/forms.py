"""Which forms of the weight used the products of a layer read: W̃ in dense layout, W̃ packed, W̃ᵀ packed, and in what order these lie."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from .. import dispatch
from ..ops import Compressed, DeviceCompressed, tensor_core_pattern
from ..ops.linear import positions
from ..pattern import BackendError, Pattern
from ..reference.layouts import COLUMNS, meta_shape
from .choice import DENSE, Product, choose, forms
from .plan import GemmPlan
from .transforms import WeightTransform

Form = Tensor | Compressed | DeviceCompressed
"""A weight in dense layout, or packed."""

TENSOR_CORES = "mma.sp"
"""The order in which packed weights lie where tensor cores multiply them."""

TALL = 16
"""Rows of a tile of that order; ``COLUMNS`` is its width."""


class Operands(NamedTuple):
    """The weight used, as fprop reads it and as dgrad does.

    Args:
        fprop: W̃ ``(out, in)``.
        dgrad: where it is another form, W̃ ``(out, in)``, or W̃ᵀ ``(in, out)`` if ``turned``.
        turned: see there.
        by: the backends whose kernels multiply in fprop and in dgrad; empty: whom the dispatcher takes.
    """

    fprop: Form
    dgrad: Form | None = None
    turned: bool = False
    by: tuple[str, str] = ("", "")

    @property
    def pattern(self) -> Pattern | None:
        """N:M of what is packed, None where nothing is."""
        return next((form.pattern for form in (self.fprop, self.dgrad) if not (form is None or isinstance(form, Tensor))), None)


class Reads(NamedTuple):
    """What one call reads: ``fprop`` ``"dense"`` or ``"packed"``, ``dgrad`` also ``"columns"``; the ``layout`` of what is packed.

    ``by``: see ``Operands``.
    """

    fprop: str
    dgrad: str
    layout: str
    by: tuple[str, str] = ("", "")

    @property
    def dense(self) -> bool:
        """W̃ in dense layout is read."""
        return DENSE in (self.fprop, self.dgrad)

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
    columns = transform.traits.transposable and plan.dgrad in ("columns", "device", "auto")
    layout = layout_for(weight, transform.pattern, dtype, columns)
    fprop, dgrad, by = plan.fprop, plan.dgrad, ["", ""]
    if fprop == "auto":
        fprop, by[0] = _chosen("fprop", ("rows",), transform, weight, dtype, layout, x)
    if dgrad == "auto" and not torch.is_grad_enabled():
        dgrad, by[1] = fprop, by[0]  # nobody will ask for it
    elif dgrad == "auto":
        dgrad, by[1] = _chosen("dgrad", _for_dgrad(transform, layout, columns), transform, weight, dtype, layout, x)
    elif dgrad in ("packed", "device") and layout != "canonical":
        # tensor cores sum along the rows of what is packed, and dgrad sums along the columns of W̃
        dgrad = "columns" if columns else DENSE
    elif dgrad == "device":
        dgrad = DENSE if transform.traits.own_dgrad else "packed"
    return Reads(fprop, dgrad, layout, (by[0], by[1]))


def _chosen(
    role: str, packed: tuple[str, ...], transform: WeightTransform, weight: Tensor, dtype: torch.dtype, layout: str, x: Tensor
) -> tuple[str, str]:
    """The rule of a product by measurement, and the backend whose kernel it is (empty: the dispatcher's)."""
    product = _product(role, packed, transform, weight, dtype, layout, x.numel() // weight.shape[1])
    found = choose(product, measure=True)
    if found == DENSE:
        return DENSE, ""
    backend, _, form = found.rpartition(" ")
    # a graph calls the op, whose dispatcher decides when it runs
    backend = "" if torch.compiler.is_compiling() else backend
    return ("columns" if (form if backend else product.forms[1]).startswith("columns") else "packed"), backend


def _product(
    role: str, packed: tuple[str, ...], transform: WeightTransform, weight: Tensor, dtype: torch.dtype, layout: str, tokens: int
) -> Product:
    (rows, cols), p = weight.shape, transform.pattern
    ending = "" if layout == "canonical" else f":{layout}"
    at_hand = (DENSE, *(form + ending for form in packed))
    return Product(role, tokens, rows, cols, p.n, p.m, dtype, weight.device, at_hand, changing=True)


def _for_dgrad(transform: WeightTransform, layout: str, columns: bool) -> tuple[str, ...]:
    """The packed forms that dgrad may read."""
    turned = ("rows",) if layout == "canonical" and not transform.traits.own_dgrad else ()
    return (*turned, *(("columns",) if columns else ()))


def wgrad_product(plan: GemmPlan, tokens: int, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Product:
    """The product of the gradient of a weight ``(rows, cols)``, whose other operand is estimated; on a GPU also as tensor cores read it."""
    rule = plan.method if plan.wgrad == "mvue" else plan.wgrad
    made: tuple[str, ...] = (DENSE, "rows")
    if device.type != "cpu" and (plan.n, plan.m) == (2, 4):
        known = forms.__wrapped__ if torch.compiler.is_compiling() else forms  # a graph would warn of the cache
        made = known(rows, tokens, plan.n, plan.m, dtype, device.type)
    return Product("wgrad", tokens, rows, cols, plan.n, plan.m, dtype, device, made, rule)


def asked(plan: GemmPlan, transform: WeightTransform, weight: Tensor, dtype: torch.dtype, tokens: int) -> tuple[Product, ...]:
    """The products for which a layer with this plan asks ``choice``: those of "auto"; see ``reads``."""
    columns = transform.traits.transposable and plan.dgrad == "auto"
    layout = layout_for(weight, transform.pattern, dtype, columns)
    rows, cols = weight.shape
    made = []
    if plan.fprop == "auto":
        made.append(_product("fprop", ("rows",), transform, weight, dtype, layout, tokens))
    if plan.dgrad == "auto":
        made.append(_product("dgrad", _for_dgrad(transform, layout, columns), transform, weight, dtype, layout, tokens))
    if plan.fprop == "auto" and plan.wgrad in ("mvue", "magnitude"):
        made.append(wgrad_product(plan, tokens, rows, cols, dtype, weight.device))
    return tuple(product for product in made if product.forms != (DENSE,))


def layout_for(weight: Tensor, pattern: Pattern, dtype: torch.dtype, columns: bool) -> str:
    """The order in which a packed weight lies: that of the tensor cores where their kernels run on its device, else the canonical one.

    Args:
        weight: ``(out, in)``. columns: Wᵀ is packed too.
    """
    rows, cols = weight.shape
    if dtype.itemsize != 2 or not tensor_core_pattern(pattern):
        return "canonical"
    if rows % TALL or cols % COLUMNS or (columns and (cols % TALL or rows % COLUMNS)):
        return "canonical"
    return TENSOR_CORES if _multiplies(weight.device, dtype, dispatch.forced_backend() or "") else "canonical"


@cache
def _multiplies(device: torch.device, dtype: torch.dtype, forced: str) -> bool:
    """Whether a kernel there, other than the reference, multiplies what lies in that order."""
    values = torch.empty(TALL, COLUMNS // 2, dtype=dtype, device=device)
    meta = torch.empty(meta_shape(TALL, COLUMNS, TENSOR_CORES), dtype=torch.int32, device=device)
    try:
        return dispatch.choose("nm_linear", values.new_empty(TALL, COLUMNS), values, meta, 2, 4, COLUMNS).backend != "reference"
    except BackendError:  # the one that is asked for by name does not
        return False


# tracing calls it and keeps the answer
_multiplies._dynamo_marked_constant = True  # type: ignore[attr-defined]


def parts(form: Form | None) -> tuple[Tensor | None, Tensor | None]:
    """The tensors of a form: W̃ and None, or values and indices (or metadata)."""
    return (form, None) if form is None or isinstance(form, Tensor) else (form.values, positions(form))
