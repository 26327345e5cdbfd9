"""Ops on groups of M weights: masks, pruning, soft thresholds, compression, and ``nm_pack``, which combines them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...pattern import ShapeError
from ...reference.layouts import EIGHT_BIT, to_layout
from ...reference.quantize import rounded
from ..shared import Parts, contiguous, overfull, pack, packed
from .core import DTYPES, core, register

LARGE = 16 << 20
"""Size in bytes from which new outputs request huge pages."""


def _fresh(x: Tensor) -> Tensor:
    """Request huge pages for ``x``, newly allocated and not yet written, to reduce page faults; returns ``x``."""
    if x.nbytes >= LARGE:
        core().want_huge_pages(x.data_ptr(), x.nbytes)
    return x


def _elementwise(op: str, name: str, dtype: torch.dtype | None = None) -> Callable[..., Tensor]:
    """Register and return an op that maps ``(..., cols)`` to the same shape, group by group."""

    @register(op)
    def run(w: Tensor, n: int, m: int, out: Tensor | None = None) -> Tensor:
        w = w if w.is_contiguous() and not w.is_neg() else contiguous(w)
        result = _fresh(torch.empty_like(w, dtype=dtype or w.dtype)) if out is None else out
        getattr(core(), name)(w.data_ptr(), DTYPES[w.dtype], w.numel(), n, m, result.data_ptr(), torch.get_num_threads())
        return result

    return run


mask = _elementwise("nm_mask", "mask", torch.bool)
prune = _elementwise("nm_prune", "prune")
soft_threshold = _elementwise("nm_soft_threshold", "soft_threshold")


@register("nm_soft_threshold_scale")
def _soft_threshold_scale(w: Tensor, n: int, m: int, out: Tensor | None = None) -> Tensor:
    w = contiguous(w)
    scale = core().soft_threshold_scale(w.data_ptr(), DTYPES[w.dtype], w.numel(), n, m, torch.get_num_threads())
    return torch.tensor(scale, dtype=torch.float32) if out is None else out.fill_(scale)


@register("nm_transposable_mask")
def transposable_mask(w: Tensor, n: int, m: int, out: Tensor | None = None) -> Tensor:
    w, cols = contiguous(w), w.shape[-1]
    result = _fresh(torch.empty_like(w, dtype=torch.bool)) if out is None else out
    core().transposable_mask(
        w.data_ptr(), DTYPES[w.dtype], w.numel() // cols if cols else 0, cols, n, m, result.data_ptr(), torch.get_num_threads()
    )
    return result


@register("nm_compress")
def compress(w: Tensor, n: int, m: int, mask: Tensor | None = None, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    w, cols = w if w.is_contiguous() and not w.is_neg() else contiguous(w), w.shape[-1]
    if out is None:
        values, indices = packed(w, w.shape[:-1], cols, n, m)
        _fresh(values)
    else:
        values, indices = out
    held = None if mask is None else mask.contiguous()
    fits = core().compress(
        w.data_ptr(), DTYPES[w.dtype], w.numel() // cols if cols else 0, cols, n, m, 0 if held is None else held.data_ptr(),
        values.data_ptr(), indices.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    if not fits:
        raise overfull("compress", n, m)
    return values, indices


@register("nm_quantize_pack")
def _quantize_pack(w: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Only the kept values are scaled and rounded."""
    values, indices = compress(w, 2, 4)
    return rounded(values.float() * scale.reshape(-1, 1), dtype), to_layout(indices, w.shape[1], EIGHT_BIT)


def check_indices(op: str, valid: bool, m: int) -> None:
    """Raise ``ShapeError`` if a kernel found an index outside its group (``valid`` is False)."""
    if not valid:
        raise ShapeError(f"{op}: an index does not exist in a group of {m}; the indices are damaged or have another pattern.")


@register("nm_decompress")
def _decompress(values: Tensor, indices: Tensor, n: int, m: int, cols: int, out: Tensor | None = None) -> Tensor:
    values = values if values.is_contiguous() and not values.is_neg() else contiguous(values)
    indices = indices.contiguous()
    dense = _fresh(values.new_empty(*values.shape[:-1], cols)) if out is None else out
    valid = core().decompress(
        values.data_ptr(), indices.data_ptr(), DTYPES[values.dtype], dense.numel() // cols if cols else 0, cols, n, m, dense.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    check_indices("decompress", valid, m)
    return dense


PARTS = Parts(mask, soft_threshold, transposable_mask, compress, _decompress)


@register("nm_pack")
def nm_pack(*args: Any, out: None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return pack(PARTS, *args)
