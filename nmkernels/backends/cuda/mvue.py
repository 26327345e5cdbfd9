"""mvue and mvue_compress: unbiased N:M estimates, along the last dimension or across it.

Memory is seen as ``(outer, length, inner)`` around the grouped dimension. The seed tensor is read by the kernels, where it lies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...pattern import Pattern
from .core import DTYPES, contiguous, core, queue, register


class Around(NamedTuple):
    """A contiguous tensor around its grouped dimension."""

    g: Tensor
    outer: int
    length: int
    inner: int


def _around(g: Tensor, dim: int, turn: bool = False) -> Around:
    dim %= g.dim()
    if turn and g.dim() == 2 and not g.is_contiguous() and g.t().is_contiguous():
        g, dim = g.t(), 1 - dim  # packed rows are the same, whichever way g lies
    g, shape = contiguous(g), g.shape
    return Around(g, shape[:dim].numel(), shape[dim], shape[dim + 1 :].numel())


@register("nm_mvue")
def mvue(g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str, out: Tensor | None = None) -> Tensor:
    """``nm_mvue``."""
    result = g.new_empty(g.shape) if out is None else out
    (g, *around), seed = _around(g, dim), seed.contiguous()
    core(g).mvue(
        g.data_ptr(), DTYPES[g.dtype], *around, n, m, seed.data_ptr(), method == "approx", result.data_ptr(), *queue(g)
    )  # fmt: skip
    return result


@register("nm_mvue_compress")
def mvue_compress(
    g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """``nm_mvue_compress``."""
    if out is None:
        p, length = Pattern(n, m), g.shape[dim]
        lead = g.movedim(dim, -1).shape[:-1]
        out = g.new_empty(*lead, p.kept(length)), g.new_empty(*lead, p.index_bytes(length), dtype=torch.uint8)
    (g, *around), seed = _around(g, dim, turn=True), seed.contiguous()
    packed = out[0].data_ptr(), out[1].data_ptr()
    core(g).mvue_compress(g.data_ptr(), DTYPES[g.dtype], *around, n, m, seed.data_ptr(), method == "approx", *packed, *queue(g))
    return out
