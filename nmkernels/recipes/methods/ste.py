"""STE and SR-STE: a hard mask recomputed at every step, with or without the decay of pruned weights."""

from __future__ import annotations

from dataclasses import dataclass

from ...autograd import HardMask
from ...optim import UpdateRule
from ...pattern import Pattern
from ..base import About, Recipe, Stage, State
from ..registry import recipe
from ..schedule import check_number, packing


@recipe("ste")
@dataclass(frozen=True)
class STE(Recipe):
    """Straight-through estimator: forward with M(W) ⊙ W, the gradient g = ∂L/∂W̃ passed to all of W.

    M is the mask of the N largest magnitudes of each group, recomputed at every step. Works with any optimizer.
    Source: the baseline of Zhou et al., "Learning N:M fine-grained structured sparse neural networks from scratch", ICLR 2021, eq. 3–4.

    Args:
        packed: multiply the compressed weight: False never; True forward, and for ∂L/∂x where a kernel reads it (on CPUs); "auto" at every
            call and in every GEMM where that was measured to be faster than the dense layout (``nm.tune``). It is packed once per step.
            Results differ from the dense layout's by rounding.

    Raises:
        RecipeError: ``packed`` is unknown.

    Example:
        >>> STE("1:4").stage({}).transform
        HardMask(pattern=Pattern("1:4"), chain=False)
    """

    packed: bool | str = False

    about = About(
        paper="the baseline of Zhou et al., ICLR 2021, arXiv 2102.04010",
        cost="a mask at every step, found in the optimizer's own pass; fprop at N/M",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        packing("STE", self.packed, self.pattern)

    def stage(self, state: State) -> Stage:
        plan = packing("STE", self.packed, self.pattern)
        return Stage(phase=1, transform=HardMask(Pattern(self.pattern)), rule=UpdateRule(masked=True), plan=plan)


@recipe("srste")
@dataclass(frozen=True)
class SRSTE(Recipe):
    """Sparse-refined STE: STE plus a decay of the pruned weights, g ← g + λ (1 − M(W)) ⊙ W.

    The term is added after unscaling, accumulation and clipping, once per optimizer step, and goes through the optimizer's moments.
    λ only matters where λ|w| is comparable with |g|: watch ``decay_ratio`` in ``handle.metrics()``. Works with any optimizer.
    Source: Zhou et al., ICLR 2021, eq. 8; λ = 2e-4 there, for SGD on ImageNet.

    Args:
        decay: λ, at least 0. With 0 it is STE.
        packed: as for ``STE``.

    Raises:
        RecipeError: a value is out of range.

    Example:
        >>> SRSTE("2:4", decay=1e-4).stage({}).rule.decay
        0.0001
    """

    decay: float = 2e-4
    packed: bool | str = False

    about = About("Zhou et al., ICLR 2021, arXiv 2102.04010", cost="as ste; the decay is part of the same pass")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("SRSTE", "decay", self.decay)
        packing("SRSTE", self.packed, self.pattern)

    def stage(self, state: State) -> Stage:
        rule, plan = UpdateRule(masked=True, decay=self.decay), packing("SRSTE", self.packed, self.pattern)
        return Stage(phase=1, transform=HardMask(Pattern(self.pattern)), rule=rule, plan=plan)
