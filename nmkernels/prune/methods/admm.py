"""ADMM: look for the mask and the kept weights together, by GEMMs alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...arguments import finite_number, whole_number
from ...pattern import Pattern
from ..base import OneShot


@dataclass(frozen=True)
class ADMM(OneShot):
    """Minimise ‖X(W−Z)ᵀ‖² over all N:M weights Z by operator splitting, then refit on the mask (after ALPS: Meng et al., NeurIPS 2024,
    arXiv 2406.07831, Algorithm 1).

    On weights and Hessian scaled by √H_jj, with the penalty ρ and the dual V: X ← W + (ρ(Z − W) − V)(H + ρI)⁻¹, Z ← the N largest of each
    group of X + V/ρ, V ← V + ρ(X − Z). Z starts with Wanda's mask. Every three iterations ρ grows, the more the more of the mask has
    changed, and the search ends when the mask is stable.

    Args:
        iterations: at most so many.
        penalty: the first ρ.
    """

    gemms: ClassVar[float] = 44

    damping: float | None = None
    refit: int = 10
    iterations: int = 60
    penalty: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("iterations", whole_number)
        self._set("penalty", finite_number, least=1e-12)  # the matrix with it is inverted

    def solve(self, w: Tensor, h: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
        scale = h.diagonal().sqrt()
        w, h = w.mul_(scale), h.div_(scale).div_(scale[:, None])
        largest, rho = self.mask, self.penalty
        mask = largest(w, pattern)
        z, v, x = w * mask, torch.zeros_like(w), torch.empty_like(w)
        before = mask
        for iteration in range(self.iterations):
            if iteration % EVERY == 0:
                inverse = h.clone()
                inverse.diagonal().add_(rho)
                inverse = torch.linalg.cholesky(inverse)
                inverse = torch.cholesky_inverse(inverse)
            z.sub_(w).mul_(rho).sub_(v)
            torch.mm(z, inverse, out=x).add_(w)
            torch.div(v, rho, out=z).add_(x)
            mask = largest(z, pattern)
            z.mul_(mask)
            v.add_(x, alpha=rho).sub_(z, alpha=rho)
            if iteration % EVERY == EVERY - 1:
                changed = float((mask ^ before).sum()) / (2 * max(1, int(before.sum())))
                if not changed:
                    break
                before, rho = mask, rho * next(growth for least, growth in GROWTH if changed >= least)
        return z.div_(scale), mask


EVERY = 3
"""Iterations between two changes of ρ, each of which costs a factorisation."""
GROWTH = (0.1, 1.3), (0.005, 1.2), (0.0, 1.1)
"""(share of the kept weights that changed, at least; factor of ρ then)."""
