"""STE and SR-STE: a hard mask recomputed at every step, with or without the decay of pruned weights."""

from __future__ import annotations

from dataclasses import dataclass

from ...autograd.transforms import HardMask
from ...optim.rules import UpdateRule
from ...pattern import Pattern
from ..contract import About, Recipe, Setup, Stage, State, choice, number
from ..registry import recipe
from ..schedule import PACKED, packed_only, packing


@recipe("ste")
@dataclass(frozen=True)
class STE(Recipe):
    """Straight-through estimator, the baseline of Zhou et al., ICLR 2021 (eq. 3–4): the gradient of W̃ = M(W) ⊙ W is passed to all of W.

    M is the mask of the N largest magnitudes of each group, recomputed at every step.

    Args:
        packed: multiply the compressed weight: "auto" where that is faster by rule, or as measured by ``nm.tune``; True forward, and for
            ∂L/∂x where a kernel reads it (on CPUs); False never. Results differ by rounding.

    Example:
        >>> STE("1:4").stage({}).transform
        HardMask(pattern=Pattern("1:4"), chain=False)
    """

    packed: bool | str = choice(*PACKED)

    about = About("the baseline of Zhou et al., ICLR 2021, arXiv 2102.04010", cost="a mask at every step; fprop at N/M")

    @property
    def setup(self) -> Setup:
        return Setup(linear_only=packed_only(self.packed))

    def stage(self, state: State) -> Stage:
        plan = packing(self.packed, self.pattern)
        return Stage(phase=1, transform=HardMask(Pattern(self.pattern)), rule=UpdateRule(masked=True), plan=plan)


@recipe("srste")
@dataclass(frozen=True)
class SRSTE(Recipe):
    """Sparse-refined STE (Zhou et al., ICLR 2021, eq. 8): STE plus a decay of the pruned weights, g ← g + λ (1 − M(W)) ⊙ W.

    The term is added after unscaling, accumulation and clipping, once per optimizer step, and goes through the optimizer's moments.
    λ only matters where λ|w| is comparable with |g|: watch ``decay_ratio`` in ``handle.metrics()``.

    Args:
        decay: λ, at least 0; with 0 it is STE. The default has the least worst loss of the measured tasks and lengths under AdamW; the
            paper's is 2e-4, for SGD on ImageNet.
        packed: as for ``STE``.

    Example:
        >>> SRSTE("2:4", decay=1e-4).stage({}).rule.decay
        0.0001
    """

    decay: float = number(0.2)
    packed: bool | str = choice(*PACKED)

    about = About("Zhou et al., ICLR 2021, arXiv 2102.04010", cost="as ste; the decay is part of the optimizer's pass")
    setup = STE.setup

    def stage(self, state: State) -> Stage:
        rule, plan = UpdateRule(masked=True, decay=self.decay), packing(self.packed, self.pattern)
        return Stage(phase=1, transform=HardMask(Pattern(self.pattern)), rule=rule, plan=plan)
