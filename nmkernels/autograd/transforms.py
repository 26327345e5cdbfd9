"""Weight transforms W -> W̃: how the weight used by the GEMMs follows from the master weight.

A transform is a frozen value with one method; its gradient is the identity (straight through), see ``linear``.
A new method of the field that changes the forward weight adds one class here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..pattern import Pattern


class WeightTransform(Protocol):
    """W ``(out, in)`` -> W̃ ``(out, in)``, computed in the master weight's dtype."""

    def __call__(self, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """W̃ of a detached master weight, written to ``out`` where given."""
        ...


@dataclass(frozen=True)
class HardMask:
    """W̃ = M(W) ⊙ W, the N largest magnitudes of each group kept (STE, SR-STE, STEP's second phase; Zhou et al. 2021, eq. 3).

    Args:
        pattern: the N:M pattern; groups along the last dimension.

    Example:
        >>> HardMask(Pattern("1:2"))(torch.tensor([[1.0, -2.0, 3.0, 0.0]]))
        tensor([[ 0., -2.,  3.,  0.]])
    """

    pattern: Pattern

    def __call__(self, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """The pruned weight; kept elements keep their bits, pruned ones are +0."""
        raw = torch.ops.nmkernels
        if out is None:
            return raw.nm_prune(weight, self.pattern.n, self.pattern.m)
        raw.nm_prune_out(weight, self.pattern.n, self.pattern.m, out=out)
        return out
