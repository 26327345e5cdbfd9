"""Transforms that remember the weight from which training started (ProxSparse)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .transforms import WEIGHT, Reads, Traits, WeightTransform, masked


@dataclass(frozen=True)
class Anchored(WeightTransform):
    """W̃ = W, with the gradient of λ ‖W / (W₀ + ε sgn W₀) ⊙ (W − W₀)‖² added once per step (ProxSparse's frozen weight regulariser).

    W₀ is ``nm_initial``, the weight as it was at the start, frozen. sgn 0 = 1. The term is zero where W is W₀ or 0, so that it pulls
    every weight to one of the two.

    Args:
        pattern: the N:M pattern; groups along the last dimension.
        strength: λ.
        epsilon: ε, on the scale of the weights; keeps small W₀ from being held as if they could not move.
    """

    strength: float = 0.0
    epsilon: float = 0.1

    reads: ClassVar[Reads] = {"nm_initial": "frozen"}

    def _traits(self) -> Traits:
        return replace(super()._traits(), is_nm=False)

    def start(self, weight: Tensor) -> dict[str, Tensor]:
        return {"nm_initial": weight.clone(memory_format=torch.contiguous_format)}

    def penalty(self, weight: Tensor, *extras: Tensor) -> dict[str, Tensor]:
        """2 λ W (W − W₀) (2W − W₀) / (W₀ + ε sgn W₀)²."""
        (initial,) = extras
        scale = initial + torch.where(initial < 0, -self.epsilon, self.epsilon).to(initial.dtype)
        return {WEIGHT: 2 * self.strength * weight * (weight - initial) * (2 * weight - initial) / scale.square()}


@dataclass(frozen=True)
class AnchoredMask(WeightTransform):
    """W̃ = M(W) ⊙ W₀: the mask of the present weight over the weight as it was at the start, ``nm_initial``.

    Example:
        >>> from nmkernels import Pattern
        >>> AnchoredMask(Pattern("1:2"))(torch.tensor([[1.0, 2.0]]), torch.tensor([[4.0, -3.0]]))
        tensor([[ 0., -3.]])
    """

    reads: ClassVar[Reads] = {"nm_initial": "frozen"}

    def start(self, weight: Tensor) -> dict[str, Tensor]:
        return {"nm_initial": weight.clone(memory_format=torch.contiguous_format)}

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        """The initial weights that are kept, bit for bit, the others +0."""
        return masked(extras[0], self.kept(weight), out)
