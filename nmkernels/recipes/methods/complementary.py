"""Complementary sparsity: groups of weights at equal spacing instead of neighbours."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...autograd import WeightTransform
from ...autograd.transforms import Traits, masked
from ...optim import UpdateRule
from ...pattern import NMError, Pattern
from ..base import About, Recipe, Stage, State
from ..registry import recipe
from ..schedule import check_choice, check_count, check_number


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


@recipe("complementary")
@dataclass(frozen=True)
class Complementary(Recipe):
    """Complementary sparsity: of the weights spaced at the same distance in a row, keep the largest.

    Source: Zhao et al., "Complementary sparsity: accelerating sparse CNNs with high accuracy on general-purpose computing platforms",
    TMLR 2023.

    Forward with W̃ = M(W) ⊙ W, M recomputed at every step: of the M weights j, j + s, …, j + (M − 1) s of a block of s · M columns the N
    largest magnitudes. The gradient is g = ∂L/∂W̃ itself, plus λ (1 − M) ⊙ W. The paper keeps one weight of each group (N = 1); other N
    are the evident generalisation. Only its abstract could be read, so that its own training method for more than 75 % sparsity is not
    here: the gradient is that of STE or SR-STE (Zhou et al., ICLR 2021), and λ is not the paper's. Works with any optimizer.

    The weight is N:M after a fixed order of its columns. ``finish`` leaves the zeros where they were trained; ``compress_`` puts groups
    side by side, and lets the layer take its input in the same order, or where it can prove that this is the same (see
    ``nn.find_chains``) the layers before it give their outputs in that order, which costs nothing at run time.

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

    spacing: int | None = None
    decay: float = 0.0
    gradient: str = "ste"

    about = About("Zhao et al., TMLR 2023", cost="a mask at every step, by a reordered copy of the weight")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("Complementary", "decay", self.decay)
        check_choice("Complementary", "gradient", self.gradient, ("ste", "chain"))
        check_count("Complementary", "spacing", self.spacing, 1, none="for groups across the row")

    def stage(self, state: State) -> Stage:
        return Stage(phase=1, transform=self.final_transform(), rule=UpdateRule(masked=True, decay=self.decay))

    def final_transform(self) -> WeightTransform:
        return StrideMask(Pattern(self.pattern), self.spacing, self.gradient == "chain")
