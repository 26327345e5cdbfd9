"""The ways to do a product, by name, and how to call one.

``"dense"`` is torch's product of the dense layout. ``"expand"`` decompresses first, for a weight that has none. ``"auto"`` is the op,
whose dispatcher takes the willing backend of highest priority. ``"cpu rows"``, ``"cuda rows:mma.sp"`` and so on are one backend's
kernel on one form of the operand.

For fprop and dgrad all of them multiply the same W̃, so they differ by rounding only. In wgrad too the choice does not change what the
method means: ĝ is the same estimate to the bit, written in dense layout for ``"dense"``, compressed for the others; and its making is part
of every candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...dispatch import implementations
from ...ops.define import plainly
from ...ops.mvue import METHODS
from .product import Product

DENSE, EXPAND, AUTO = "dense", "expand", "auto"
NEVER = ("reference",)
"""Backends that are the definition of right and not fast; those of negative priority, test instruments, are left out too."""

Packed = tuple[Tensor, Tensor]
"""Values, and indices or metadata, of a compressed operand."""
Forms = Mapping[str, "Tensor | Packed"]
"""The sparse operand by the names of ``Product.forms``."""


def names(product: Product) -> list[str]:
    """Every candidate that might run, the baseline first; whether a backend takes the call shows when it is tried."""
    found = [DENSE] if DENSE in product.forms else [AUTO]
    if DENSE not in product.forms and any(form in ("rows", "columns") for form in product.forms):
        found.append(EXPAND)
    for form in product.forms:
        op = op_of(product, form)
        if op:
            found += [f"{i.backend} {form}" for i in implementations(op) if i.backend not in NEVER and i.priority >= 0]
    return found


def op_of(product: Product, form: str) -> str:
    """The raw op that multiplies this form of the operand; empty if none does."""
    kind, _, layout = form.partition(":")
    if product.role == "fprop":
        return "nm_linear" if kind == "rows" else ""
    if product.role == "dgrad":
        return "nm_linear" if kind == "columns" else "nm_linear_dgrad" if kind == "rows" and not layout else ""
    return "nm_linear_wgrad" if kind == "rows" else ""


def pattern_of(product: Product, form: str) -> tuple[int, int]:
    """N, M of the operand in this form: the layouts of tensor cores are always 2:4."""
    return (2, 4) if ":" in form else (product.n, product.m)


def arguments(product: Product, form: str, packed: Packed, other: Tensor, bias: Tensor | None = None) -> tuple[Any, ...]:
    """Those of ``op_of(product, form)``; ``other`` is x in fprop and wgrad, g in dgrad."""
    values, indices = packed
    pattern = pattern_of(product, form)
    if product.role == "wgrad":
        return values, indices, *pattern, product.tokens, other
    if product.role == "dgrad":
        return other, values, indices, *pattern, product.rows if form.startswith("columns") else product.cols
    return other, values, indices, *pattern, product.cols, bias


def call(
    name: str, product: Product, other: Tensor, operand: Forms | Tensor, *, bias: Tensor | None = None, seed: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Do ``product`` by candidate ``name``.

    Args:
        other: x ``(..., in)`` in fprop and wgrad (there a matrix), g ``(..., out)`` in dgrad.
        operand: W̃ by its forms; in wgrad g itself, ``(tokens, out)``, which is estimated here.
        bias: ``(out,)``, of fprop. seed: int64 ``(2,)``, of the estimate. out: where the result goes; of compressed candidates.
    """
    if name in (DENSE, EXPAND):
        w = _dense_operand(product, operand, seed) if name == DENSE else _expanded(product, operand, seed)
        return _deliver(_dense(product, other, w, bias), out)
    backend, form = name.partition(" ")[0], form_of(name, product)
    op, args = op_of(product, form), arguments(product, form, _packed(product, operand, seed, form), other, bias)
    fn = None if name == AUTO else function(op, backend, args)
    if fn is None:  # its dispatcher knows another way
        return _deliver(getattr(torch.ops.nmkernels, op)(*args), out)
    return plainly(fn, *args) if out is None else plainly(fn, *args, out=out)


def _packed(product: Product, operand: Forms | Tensor, seed: Tensor | None, form: str) -> Any:
    return pack_estimate(product, operand, seed, form) if isinstance(operand, Tensor) else operand[form]


def _dense_operand(product: Product, operand: Forms | Tensor, seed: Tensor | None) -> Any:
    return estimate(product, operand, seed) if isinstance(operand, Tensor) else operand[DENSE]


def _expanded(product: Product, operand: Forms | Tensor, seed: Tensor | None) -> Tensor:
    form = form_of(EXPAND, product)
    cols = product.tokens if product.role == "wgrad" else product.cols if form == "rows" else product.rows
    w = torch.ops.nmkernels.nm_decompress(*_packed(product, operand, seed, form), product.n, product.m, cols)
    return w if form == "rows" else w.t()


def form_of(name: str, product: Product) -> str:
    """The form of the operand that candidate ``name`` reads: the only one that ``call`` must find."""
    if name == DENSE:
        return DENSE
    if name == EXPAND:
        return next(form for form in product.forms if form in ("rows", "columns"))
    return name.partition(" ")[2] or next(form for form in product.forms if op_of(product, form))


def function(op: str, backend: str, args: tuple[Any, ...]) -> Callable[..., Tensor] | None:
    """The backend's function for ``op(*args)``; None if it has none or declines, or if the tensors are not what they look like."""
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return None
    entry = next((i for i in implementations(op) if i.backend == backend), None)
    return entry.fn if entry is not None and entry.supports(*args)[0] else None


def declined(product: Product, name: str, args: tuple[Any, ...]) -> str:
    """Why the backend of candidate ``name`` does not take the call; empty if it does."""
    backend, _, form = name.partition(" ")
    entry = next((i for i in implementations(op_of(product, form)) if i.backend == backend), None)
    if entry is None:
        return "no such backend"
    can, reason = entry.supports(*args)
    return "" if can else reason


def _dense(product: Product, other: Tensor, operand: Any, bias: Tensor | None) -> Tensor:
    if product.role == "fprop":
        return F.linear(other, operand, bias)
    return other.matmul(operand) if product.role == "dgrad" else operand.matmul(other)


def _deliver(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)


# ---- the estimate of wgrad


def estimate(product: Product, g: Tensor, seed: Tensor | None) -> Tensor:
    """ĝᵀ ``(out, tokens)`` in dense layout."""
    raw = torch.ops.nmkernels
    if product.rule in METHODS:
        return raw.nm_mvue(g, product.n, product.m, 0, seed, product.rule).t()
    return raw.nm_prune(_padded(product, g), product.n, product.m)[:, : product.tokens]


def pack_estimate(product: Product, g: Tensor, seed: Tensor | None, form: str = "rows") -> Packed:
    """ĝᵀ ``(out, tokens)`` compressed along tokens, its positions in the order of ``form``."""
    raw = torch.ops.nmkernels
    if product.rule in METHODS:
        values, indices = raw.nm_mvue_compress(g, product.n, product.m, 0, seed, product.rule)
    else:
        values, indices = raw.nm_compress(_padded(product, g), product.n, product.m, None)
    layout = form.partition(":")[2]
    return (values, raw.nm_metadata(indices, product.tokens, layout)) if layout else (values, indices)


def _padded(product: Product, g: Tensor) -> Tensor:
    return F.pad(g.t(), (0, -product.tokens % product.m)).contiguous()
