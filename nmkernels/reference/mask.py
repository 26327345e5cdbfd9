"""The N:M mask: the N largest magnitudes of every group of M consecutive elements of the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from .common import grouped, magnitude_keys


def mask(w: Tensor, n: int, m: int) -> Tensor:
    """Mark the ``n`` largest magnitudes of every group of ``m``: M_i = 1 iff fewer than n elements rank above i.

    Element j ranks above i iff |w_j| > |w_i|, or |w_j| = |w_i| and j < i. -0.0 equals 0.0; a NaN ranks above everything and NaNs tie.
    """
    keys = grouped(magnitude_keys(w), m)
    kept = keys.sort(dim=-1, descending=True, stable=True).indices[..., :n]
    return torch.zeros(keys.shape, dtype=torch.bool, device=w.device).scatter_(-1, kept, True).flatten(-2)


def prune(w: Tensor, n: int, m: int) -> Tensor:
    """Keep the bits of every element that ``mask`` marks and put +0.0 elsewhere: out = w where M else +0.0.

    It selects, never multiplies, so a pruned NaN or infinity becomes 0.
    """
    return w.contiguous().masked_fill(~mask(w, n, m), 0.0)


def is_nm(w: Tensor, n: int, m: int) -> bool:
    """Whether every group of ``m`` has at most ``n`` non-zeros; a NaN is not zero, -0.0 is."""
    return bool((grouped(w != 0, m).sum(-1) <= n).all())
