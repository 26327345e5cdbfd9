"""The operations in eager torch, as users write them, for comparison."""

from __future__ import annotations

import torch
from torch import Tensor


def mask(w: Tensor, n: int, m: int) -> Tensor:
    """The mask of the top N of each group."""
    groups = w.abs().unflatten(-1, (-1, m))
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, groups.topk(n, -1).indices, True).flatten(-2)


def prune(w: Tensor, n: int, m: int) -> Tensor:
    """The weight times its mask."""
    return w * mask(w, n, m)


def compress(w: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    """Values and positions in order of position; for M <= 4 positions are packed in 2 bits, otherwise bytes."""
    groups = w.unflatten(-1, (-1, m))
    kept = groups.abs().topk(n, -1).indices.sort(-1).values
    values = groups.gather(-1, kept).flatten(-2)
    if (n, m) != (2, 4):
        return values, kept.to(torch.uint8).flatten(-2)
    codes = (kept << torch.arange(0, 2 * n, 2, device=w.device)).sum(-1)
    return values, (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def soft_threshold(w: Tensor, n: int, m: int) -> Tensor:
    """Every magnitude reduced by the (N+1)-th largest of its group."""
    groups = w.unflatten(-1, (-1, m))
    size = groups.abs()
    t = size.topk(n + 1, -1).values[..., -1:] if n < m else torch.zeros_like(size[..., :1])
    return (groups.sign() * (size - t).clamp(min=0)).flatten(-2)


def decompress(values: Tensor, positions: Tensor, m: int) -> Tensor:
    """Values scattered to their (unpacked) positions; both ``(rows, groups, N)``."""
    return values.new_zeros(*values.shape[:-1], m).scatter_(-1, positions, values).flatten(-2)
