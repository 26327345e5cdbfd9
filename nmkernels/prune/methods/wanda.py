"""Wanda: keep the weights that move the output most, as they are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...pattern import Pattern
from ..base import OneShot
from ..solve import scales


@dataclass(frozen=True)
class Wanda(OneShot):
    """Keep the N largest |w|·‖x‖₂ of each group, x the weight's input feature over all tokens (Sun et al., ICLR 2024, eq. 1).

    ``Wanda(refit=10)`` fits the kept weights afterwards, which is cheap and better than SparseGPT on most models.
    """

    def solve(self, w: Tensor, h: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
        mask = self.mask(w * scales(h), pattern)
        return w * mask, mask
