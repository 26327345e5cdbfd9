"""transposable_mask, 2:4."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._dispatch import Verdict
from ._core import DTYPES, contiguous, core, queue, register


def supports_transposable(w: Tensor, n: int, m: int) -> Verdict:
    """What transposable_mask can run."""
    if (n, m) != (2, 4):
        return False, f"it tries the patterns of 2:4 only; {n}:{m} is a matching problem, which the reference and the CPU solve"
    return True, ""


@register("nm_transposable_mask", supports_transposable)
def transposable_mask(w: Tensor, n: int, m: int, out: Tensor | None = None) -> Tensor:
    """``nm_transposable_mask``."""
    w, cols = contiguous(w), w.shape[-1]
    result = torch.empty_like(w, dtype=torch.bool) if out is None else out
    if w.numel():
        core(w).transposable_mask(w.data_ptr(), DTYPES[w.dtype], w.numel() // cols, cols, result.data_ptr(), *queue(w))
    return result
