"""MaxQ's soft masks: kept weights are enlarged by how they rank in their row, and groups become N:M one after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .transforms import Reads, Traits, WeightTransform, masked


@dataclass(frozen=True)
class SoftQuery(WeightTransform):
    """W̃ = M(W) ⊙ (1 + Q(W)) ⊙ W: the N largest magnitudes of each group, those that are large in their row too up to doubled (MaxQ).

    With k = cols N/M, a the magnitudes of a row and a₍ₖ₎ the k-th largest of them: Q = σ((a − θ)/τ), θ = (a₍ₖ₎ + a₍ₖ₊₁₎)/2, where
    a ≥ a₍ₖ₎, and 0 elsewhere.

    Args:
        pattern: the N:M pattern, N < M; groups along the last dimension.
        tau: τ, on the scale of the weights.
        whole: add a second query of the same form over the whole weight instead of its rows.
        chain: the gradient is g ⊙ M ⊙ (1 + Q), by the chain rule with both taken as constants, instead of g.

    Example:
        >>> from nmkernels import Pattern
        >>> SoftQuery(Pattern("1:2"), tau=1e-9)(torch.tensor([[1.0, 0.0, 3.0, -4.0]]))
        tensor([[ 1.,  0.,  0., -8.]])
    """

    tau: float = 1e-2
    whole: bool = False
    chain: bool = False

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        return masked(weight * self.factor(weight).to(weight.dtype), self.kept(weight, *extras), out)

    def gradient(self, g: Tensor, weight: Tensor, *extras: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        return masked(g * self.factor(weight).to(g.dtype), self.kept(weight, *extras)) if self.chain else g, {}

    def factor(self, weight: Tensor) -> Tensor:
        """1 + Q of every weight, kept or not; in fp32 for 16-bit weights."""
        size = weight.abs() if weight.dtype.itemsize > 2 else weight.abs().float()
        factor = 1.0 + self._query(size)
        return factor + self._query(size.reshape(1, -1)).reshape(size.shape) if self.whole else factor

    def _query(self, size: Tensor) -> Tensor:
        below = size.shape[1] - self.pattern.kept(size.shape[1])
        if not below:  # layer-wise patterns may leave a layer dense, and then no weight ranks above another
            return torch.zeros_like(size)
        low, high = (size.kthvalue(k, dim=1, keepdim=True).values for k in (below, below + 1))
        return torch.where(size >= high, torch.sigmoid((size - (low + high) / 2) / self.tau), 0.0)


@dataclass(frozen=True)
class PartlyDense(SoftQuery):
    """The same while a share D of the groups is dense yet: M is all ones in the ⌊D · groups⌋ of the smallest Σ|w|, ties by position.

    D is ``nm_dense``, a 0-d tensor that the schedule lowers from 1 to 0.
    """

    reads: ClassVar[Reads] = {"nm_dense": "fed"}

    def _traits(self) -> Traits:
        return replace(super()._traits(), is_nm=False)

    def kept(self, weight: Tensor, *extras: Tensor) -> Tensor:
        sums = weight.abs().reshape(-1, self.pattern.m).sum(1, dtype=torch.promote_types(weight.dtype, torch.float32))
        order = sums.argsort(stable=True)
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        # a share that stands for a whole number of groups must not fall below it by rounding
        dense = rank < torch.floor(extras[0] * order.numel() + 1e-6)
        return super().kept(weight) | dense.repeat_interleave(self.pattern.m).reshape(weight.shape)
