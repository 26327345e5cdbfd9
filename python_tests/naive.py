"""Naive masks in plain torch, for tests to compare with; nothing here uses the package."""

from __future__ import annotations

import torch
from torch import Tensor


def mask(w: Tensor, n: int, m: int) -> Tensor:
    """Bool mask of the n largest magnitudes of every m along the last dimension; the lower index wins a tie."""
    groups = w.detach().abs().unflatten(-1, (-1, m))
    order = groups.sort(dim=-1, descending=True, stable=True).indices[..., :n]
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order, True).flatten(-2)


def masked(w: Tensor, n: int, m: int) -> Tensor:
    """w with the pruned elements set to 0."""
    return torch.where(mask(w, n, m), w.detach(), 0.0)
