"""Ops that map every group of M weights to a group of the same size."""

from __future__ import annotations

import torch
from torch import Tensor

from ._core import DTYPES, contiguous, core, queue, register


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
