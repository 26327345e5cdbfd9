"""STE and SR-STE: a hard mask recomputed at every step, with or without the decay of pruned weights."""

from __future__ import annotations

from dataclasses import dataclass

from ...autograd import HardMask
from ...optim import UpdateRule
from ...pattern import Pattern
from ..base import Recipe, Stage, State
from ..packing import packing
from ..registry import recipe
from ..schedule import check_decay


@recipe("ste")
@dataclass(frozen=True)
class STE(Recipe):
    """Straight-through estimator: forward with M(W) ⊙ W, the gradient g = ∂L/∂W̃ passed to all of W.

    M is the mask of the N largest magnitudes of each group, recomputed at every step. Works with any optimizer.
    Source: the baseline of Zhou et al., "Learning N:M fine-grained structured sparse neural networks from scratch", ICLR 2021, eq. 3–4.

    Args:
        packed: multiply the compressed weight: False never; True forward, and for ∂L/∂x where a kernel reads it (on CPUs); "auto" at every
            call and in every product where that was measured to be faster than the dense layout (``nm.tune``). It is packed once per
            step. Results differ from the dense layout's by rounding. In fp32 on 2 CPU cores
            a step with SR-STE (forward, backward, MaskedAdamW) of a 4096×1024 layer takes 0.76 of the dense layer's time with 256 tokens
            and 0.77 with 2048, of a 1024×1024 one 0.96 and 0.76; unpacked 0.89 to 1.03 (AMD EPYC, 2026-11-21). bf16 gains nothing there.

    Raises:
        RecipeError: ``packed`` is unknown.

    Example:
        >>> STE("1:4").stage({}).transform
        HardMask(pattern=Pattern("1:4"), chain=False)
    """

    paper = "the baseline of Zhou et al., ICLR 2021, arXiv 2102.04010"
    patterns = "any N:M"
    extra_state = "none"
    cost = "a mask at every step, found in the optimizer's own pass; fprop at N/M"

    packed: bool | str = False

    def __post_init__(self) -> None:
        super().__post_init__()
        packing("STE", self.packed, self.pattern)

    def stage(self, state: State) -> Stage:
        """Always phase 1, masked."""
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

    paper = "Zhou et al., ICLR 2021, arXiv 2102.04010"
    patterns = "any N:M"
    extra_state = "none"
    cost = "as ste; the decay is part of the same pass"

    decay: float = 2e-4
    packed: bool | str = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay("SRSTE", self.decay)
        packing("SRSTE", self.packed, self.pattern)

    def stage(self, state: State) -> Stage:
        """Always phase 1, masked, with the decay."""
        rule, plan = UpdateRule(masked=True, decay=self.decay), packing("SRSTE", self.packed, self.pattern)
        return Stage(phase=1, transform=HardMask(Pattern(self.pattern)), rule=rule, plan=plan)
