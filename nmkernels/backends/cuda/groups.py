"""mask, prune, soft_threshold and its scale, and transposable_mask at 2:4."""

from __future__ import annotations

import torch
from torch import Tensor

from ..shared import contiguous, only_2_4
from .core import DTYPES, core, queue, register


def _elementwise(op: str, name: str, dtype: torch.dtype | None = None) -> None:
    @register(op)
    def run(w: Tensor, n: int, m: int, out: Tensor | None = None) -> Tensor:
        w = contiguous(w)
        result = torch.empty_like(w, dtype=dtype or w.dtype) if out is None else out
        getattr(core(w), name)(w.data_ptr(), DTYPES[w.dtype], w.numel(), n, m, result.data_ptr(), *queue(w))
        return result


_elementwise("nm_mask", "mask", torch.bool)
_elementwise("nm_prune", "prune")
_elementwise("nm_soft_threshold", "soft_threshold")


@register("nm_soft_threshold_scale")
def soft_threshold_scale(w: Tensor, n: int, m: int, out: Tensor | None = None) -> Tensor:
    w = contiguous(w)
    scale = w.new_empty((), dtype=torch.float32) if out is None else out
    kernels, numel = core(w), w.numel()
    sums = w.new_empty(kernels.soft_threshold_chunks(numel, n, m), 2, dtype=torch.float64)
    kernels.soft_threshold_scale(w.data_ptr(), DTYPES[w.dtype], numel, n, m, sums.data_ptr(), scale.data_ptr(), *queue(w))
    return scale


@register("nm_transposable_mask", lambda w, n, m: only_2_4(n, m))
def transposable_mask(w: Tensor, n: int, m: int, out: Tensor | None = None) -> Tensor:
    w, cols = contiguous(w), w.shape[-1]
    result = torch.empty_like(w, dtype=torch.bool) if out is None else out
    if w.numel():
        core(w).transposable_mask(w.data_ptr(), DTYPES[w.dtype], w.numel() // cols, cols, result.data_ptr(), *queue(w))
    return result
