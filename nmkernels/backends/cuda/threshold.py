"""soft_threshold_scale: two kernels with their partial sums between them, nothing for the host to wait for."""

from __future__ import annotations

import torch
from torch import Tensor

from ._core import DTYPES, contiguous, core, queue, register


@register("nm_soft_threshold_scale")
def soft_threshold_scale(w: Tensor, n: int, m: int, out: Tensor | None = None) -> Tensor:
    """``nm_soft_threshold_scale``."""
    w = contiguous(w)
    scale = w.new_empty((), dtype=torch.float32) if out is None else out
    kernels, numel = core(w), w.numel()
    sums = w.new_empty(kernels.soft_threshold_chunks(numel, n, m), 2, dtype=torch.float64)
    kernels.soft_threshold_scale(w.data_ptr(), DTYPES[w.dtype], numel, n, m, sums.data_ptr(), scale.data_ptr(), *queue(w))
    return scale
