"""Complementary sparsity: groups of weights at equal spacing instead of neighbours."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...autograd.transforms import KeptMask, Traits, WeightTransform, masked
from ...optim.rules import UpdateRule
from ...pattern import NMError, Pattern
from ..contract import About, Recipe, Setup, Stage, State, choice, count, number
from ..registry import recipe


@dataclass(frozen=True)
class StrideMask(KeptMask):
    """W̃ = M(W) ⊙ W with ``Complementary``'s M; in the order ``traits.columns(in)`` the columns of a group are adjacent."""

    spacing: int | None = None
    chain: bool = False

    def _traits(self) -> Traits:
        return replace(super()._traits(), columns=self._columns)

    def start(self, weight: Tensor) -> dict[str, Tensor]:
        self._width(weight.shape[1])
        return {}

    def _width(self, cols: int) -> int:
        """The spacing; raises ``NMError`` where the columns are not a whole number of blocks."""
        m, spacing = self.pattern.m, self.spacing or cols // self.pattern.m
        if not spacing or cols % (spacing * m):
            raise NMError(
                f"in_features={cols} is not a multiple of spacing x M = {spacing} x {m}; choose a spacing that divides {cols / m:g}, "
                "or None for groups across the whole row."
            )
        return spacing

    def _columns(self, cols: int) -> Tensor | None:
        """The order in which the columns of a group are adjacent, int64 ``(cols,)``; None where they are already."""
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

    def gradient(self, g: Tensor, weight: Tensor, *extras: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        return masked(g, self.kept(weight)) if self.chain else g, {}


@recipe("complementary")
@dataclass(frozen=True)
class Complementary(Recipe):
    """Complementary sparsity (Zhao et al., TMLR 2023): of the weights spaced at the same distance in a row, keep the largest.

    Forward with W̃ = M(W) ⊙ W, M recomputed at every step: of the M weights j, j + s, …, j + (M − 1) s of a block of s · M columns the N
    largest magnitudes. The gradient is g = ∂L/∂W̃ itself, plus λ (1 − M) ⊙ W, as of STE or SR-STE: only the paper's abstract, which has
    N = 1, could be read. ``finish`` leaves the zeros where they were trained; ``compress_`` puts groups side by side and gives the layer
    its input in the same order.

    Args:
        spacing: s, columns between neighbours of a group; None is in/M, groups across the whole row. 1 is ordinary N:M.
        decay: λ, at least 0. With 0 it is STE.
        gradient: ``"ste"`` g, or ``"chain"`` M ⊙ g.

    Raises:
        RecipeError: a value is out of range; or, at ``sparsify_``, s · M does not divide a layer's ``in_features``.

    Example:
        >>> Complementary("1:4", decay=1e-4).stage({}).transform
        StrideMask(pattern=Pattern("1:4"), spacing=None, chain=False)
    """

    spacing: int | None = count(None, least=1, none="for groups across the row")
    decay: float = number(0.0)
    gradient: str = choice("ste", "chain")

    about = About("Zhao et al., TMLR 2023", cost="a mask at every step, by a reordered copy of the weight")
    setup = Setup(linear_only="groups the inputs of linear layers that are not adjacent")

    def stage(self, state: State) -> Stage:
        return Stage(phase=1, transform=self.final_transform(), rule=UpdateRule(masked=True, decay=self.decay))

    def final_transform(self) -> WeightTransform:
        return StrideMask(Pattern(self.pattern), self.spacing, self.gradient == "chain")
