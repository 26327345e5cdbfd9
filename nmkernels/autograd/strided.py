"""Masks whose groups are weights at equal spacing instead of neighbours."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..pattern import NMError
from .transforms import Traits, WeightTransform, masked


@dataclass(frozen=True)
class StrideMask(WeightTransform):
    """W̃ = M(W) ⊙ W with the N largest magnitudes kept of every M weights that lie ``spacing`` columns apart.

    A row is cut into blocks of spacing · M columns; group j of a block is its columns j, j + spacing, …, j + (M − 1) spacing. Taken in
    the order ``traits.columns(in)``, the groups are neighbours and the weight is N:M.

    Args:
        pattern: N:M.
        spacing: columns between two weights of a group; 1 is the mask of ``HardMask``, None is in/M, groups across the whole row.
        chain: the gradient is M(W) ⊙ g, by the chain rule with M taken as a constant, instead of g.

    Example:
        >>> from nmkernels import Pattern
        >>> StrideMask(Pattern("1:2"))(torch.tensor([[1.0, 2.0, 3.0, -1.0]]))
        tensor([[0., 2., 3., 0.]])
    """

    spacing: int | None = None
    chain: bool = False

    def _traits(self) -> Traits:
        return replace(super()._traits(), columns=self._columns)

    def start(self, weight: Tensor) -> dict[str, Tensor]:
        """Nothing.

        Raises:
            NMError: the columns of the weight are no whole number of blocks.
        """
        self._width(weight.shape[1])
        return {}

    def _width(self, cols: int) -> int:
        m, spacing = self.pattern.m, self.spacing or cols // self.pattern.m
        if not spacing or cols % (spacing * m):
            raise NMError(
                f"in_features={cols} is not a multiple of spacing x M = {spacing} x {m}; choose a spacing that divides {cols / m:g}, "
                "or None for groups across the whole row."
            )
        return spacing

    def _columns(self, cols: int) -> Tensor | None:
        """The order in which the groups are neighbours, int64 ``(cols,)``; None where they are already."""
        spacing = self._width(cols)
        if spacing == 1:
            return None
        return torch.arange(cols).view(-1, self.pattern.m, spacing).transpose(1, 2).flatten()

    def kept(self, weight: Tensor, *extras: Tensor) -> Tensor:
        rows, cols = weight.shape
        p, spacing = self.pattern, self._width(cols)
        grouped = weight.reshape(rows, -1, p.m, spacing).transpose(2, 3).reshape(rows, cols)
        mask = torch.ops.nmkernels.nm_mask(grouped, p.n, p.m)
        return mask.view(rows, -1, spacing, p.m).transpose(2, 3).reshape(rows, cols)

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        return masked(weight, self.kept(weight), out)

    def gradient(self, g: Tensor, weight: Tensor, *extras: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        return masked(g, self.kept(weight)) if self.chain else g, {}
