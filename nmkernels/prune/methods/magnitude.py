"""Magnitude: keep the largest weights, as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...pattern import Pattern
from ..base import OneShot


@dataclass(frozen=True)
class Magnitude(OneShot):
    """Keep the N largest |w| of each group: what ``ASP`` does, which needs no data."""

    guarded: ClassVar[bool] = False

    def solve(self, w: Tensor, h: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
        mask = self.mask(w, pattern)
        return w * mask, mask
