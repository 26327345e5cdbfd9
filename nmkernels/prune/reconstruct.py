"""The error of a pruned weight on its inputs, and the values that minimise it on a given mask."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 1024
"""Rows that are worked on together, which bounds temporary memory; rows are independent of each other."""


def squared_error(w: Tensor, z: Tensor | None, h: Tensor) -> Tensor:
    """Σ over rows of (w − z) H (w − z)ᵀ, 0-d fp64: the mean over tokens of ‖x(W−Z)ᵀ‖². None: Z = 0."""
    total = torch.zeros((), dtype=torch.float64, device=w.device)
    for i in range(0, w.shape[0], ROWS):
        d = w[i : i + ROWS] if z is None else w[i : i + ROWS] - z[i : i + ROWS]
        total += ((d @ h).mul_(d)).sum(dtype=torch.float64)
    return total.clamp_min_(0.0)


def scales(h: Tensor) -> Tensor:
    """√H_jj, the size of each input, by which weights are weighed. One that was always zero counts so little that its weights come last in
    their group, by magnitude among themselves: they cost nothing, and are kept where others leave room.
    """
    diagonal = h.diagonal()
    live = diagonal > 0
    least = diagonal[live].min() if bool(live.any()) else torch.ones((), dtype=h.dtype, device=h.device)
    return torch.where(live, diagonal, least * NOTHING).sqrt()


def damped(h: Tensor, damping: float) -> Tensor:
    """H + damping · mean(diag H) · I; an input that was always zero counts like the mean of the others."""
    diagonal = h.diagonal()
    live = diagonal > 0
    mean = diagonal[live].mean() if bool(live.any()) else torch.ones((), dtype=h.dtype, device=h.device)
    h = h.clone()
    h.diagonal().masked_fill_(~live, 0.0).add_(torch.where(live, damping * mean, mean))
    return h


def refit(w: Tensor, z: Tensor, mask: Tensor, h: Tensor, steps: int) -> Tensor:
    """The values on ``mask`` that minimise the error, by conjugate gradients from ``z``, in place (ALPS, Algorithm 2).

    All rows go together, each with its own step sizes; the preconditioner is the diagonal of H. ``steps`` at most: it ends when a step
    lowers the error by less than a thousandth.
    """
    diagonal, eps = h.diagonal(), torch.finfo(h.dtype).eps
    inverse = 1 / diagonal
    for i in range(0, w.shape[0], ROWS):
        part, keep = z[i : i + ROWS], mask[i : i + ROWS]
        d = w[i : i + ROWS] - part
        r = d @ h
        error = float((d * r).sum())
        r.mul_(keep)
        p = r * inverse
        size = (r * p).sum(1, keepdim=True)
        for _ in range(steps):
            q = (p @ h).mul_(keep)
            curvature = (p * q).sum(1, keepdim=True)
            # of a singular H it may be rounding alone, even negative
            noise = p.square() @ diagonal[:, None] * (4 * eps)
            step = torch.where(curvature > noise.clamp_min_(TINY), size / curvature, 0.0)
            part.addcmul_(step, p)
            gain = float((step * size).sum())
            if gain < ENOUGH * error:
                break
            error -= gain
            r.addcmul_(step, q, value=-1)
            torch.mul(r, inverse, out=q)
            last, size = size, (r * q).sum(1, keepdim=True)
            p.mul_(size / last.clamp_min_(TINY)).add_(q)
    return z


ENOUGH = 1e-3
"""The share of the error by which a step has to lower it for another one to follow."""
NOTHING = 1e-16
"""The square of an input that was always zero, relative to the smallest of the others."""
TINY = 1e-30
"""Smaller squares end the search of a row."""
