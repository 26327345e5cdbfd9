"""Complementary sparsity: groups of weights at equal spacing instead of neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...autograd import StrideMask, WeightTransform
from ...optim import UpdateRule
from ...pattern import Pattern, RecipeError
from ..base import Recipe, Stage, State
from ..registry import recipe
from ..schedule import check_choice, check_decay


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
        grad: ``"ste"`` g, or ``"chain"`` M ⊙ g.

    Raises:
        RecipeError: a value is out of range; or, at ``sparsify_``, s · M does not divide a layer's ``in_features``.

    Example:
        >>> Complementary("1:4", decay=1e-4).stage({}).transform
        StrideMask(pattern=Pattern("1:4"), spacing=None, chain=False)
    """

    spacing: int | None = None
    decay: float = 0.0
    grad: str = "ste"

    paper: ClassVar[str] = "Zhao et al., TMLR 2023"
    patterns: ClassVar[str] = "any N:M"
    extra_state: ClassVar[str] = "none"
    cost: ClassVar[str] = "a mask at every step, by a reordered copy of the weight"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay("Complementary", self.decay)
        check_choice("Complementary", "grad", self.grad, ("ste", "chain"))
        s = self.spacing
        if s is not None and (isinstance(s, bool) or not isinstance(s, int) or s < 1):
            raise RecipeError(f"Complementary: spacing={s!r} must be a whole number of at least 1, or None for groups across the row.")

    def stage(self, state: State) -> Stage:
        """Always phase 1, masked, with the decay."""
        return Stage(phase=1, transform=self.final_transform(), rule=UpdateRule(masked=True, decay=self.decay))

    def final_transform(self) -> WeightTransform:
        """The mask of equally spaced groups."""
        return StrideMask(Pattern(self.pattern), self.spacing, self.grad == "chain")
