"""SdGf: hard masks whose pattern tightens, or refines, on the way to N:M."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ...autograd.transforms import HardMask, WeightTransform
from ...optim.rules import UpdateRule
from ...pattern import MAX_M, Pattern, RecipeError
from ..contract import About, LayerSetup, Stage, State, choice
from ..registry import recipe
from ..schedule import PACKED, ScheduledRecipe, packing, phases
from .ste import STE


@recipe("sdgf")
@dataclass(frozen=True)
class SdGf(ScheduledRecipe):
    """Structure decay gradient flow (Bambhaniya et al., "Progressive gradient flow for robust N:M sparsity training", arXiv 2402.04744).

    Forward with M_f(W) ⊙ W, M_f the mask of frame f, recomputed at every step; frames are of equal length::

        stepwise   M−1 : M,  M/2 : M,  M/4 : M,  ...,  N : M      log₂(M/N) + 1 frames; 1:8 goes 7, 4, 2, 1 of 8
        geometric  8N : 8M,  4N : 4M,  2N : 2M,  N : M            the same share kept, in ever smaller groups
        densify    N : 8M,   N : 4M,   N : 2M,   N : M            from too sparse to N:M (in the public code only)

    Halves are rounded up. A layer too narrow for a frame, or a frame with M above 256, takes the next one that fits. By default the
    gradient is masked too, and the last frame continues for the last quarter of the run, as in Kao et al. (2022, arXiv 2209.07617).
    Bambhaniya et al.'s public code is ``gradient="ste", end=1.0``.

    Args:
        schedule: ``"stepwise"``, ``"geometric"`` or ``"densify"``.
        start, end: the steps, or shares of ``total_steps``, after which frames begin and would end; the last one continues.
        gradient: ``"chain"`` M_f ⊙ g; ``"ste"`` g is passed to all of W.
        packed: as for ``STE``.

    Raises:
        RecipeError: there are more frames than steps for them.

    Example:
        >>> [begin for begin, stage in SdGf("1:8", total_steps=100, schedule="geometric").stages]
        [0, 0, 19, 38, 56]
    """

    schedule: str = choice("stepwise", "geometric", "densify")
    start: float | int = 0
    end: float | int = 0.75
    gradient: str = choice("chain", "ste")
    packed: bool | str = choice(*PACKED, resume="any")

    about = About(
        paper="Bambhaniya et al., 2024, arXiv 2402.04744",
        patterns="any N:M; frames with M above 256 are left out",
        extra_state="a step count",
        cost="fprop at the N/M of each frame; a mask at every step",
    )
    setup = STE.setup

    def __post_init__(self) -> None:
        super().__post_init__()
        begins = [begin for begin, _ in self.stages[1:]]
        if len(set(begins)) < len(begins):
            raise RecipeError(f"SdGf: {len(begins)} frames do not fit between start and end; give more steps.")

    def frames(self) -> tuple[Pattern, ...]:
        """The patterns in their order, the last one N:M."""
        p = Pattern(self.pattern)
        if self.schedule == "stepwise":
            counts, next_one = [p.m - 1] if p.m - 1 > p.n else [], (p.m + 1) // 2
            while next_one > p.n:
                counts.append(next_one)
                next_one = (next_one + 1) // 2
            return tuple(Pattern(n, p.m) for n in dict.fromkeys([*counts, p.n]))
        sizes = [f for f in (8, 4, 2, 1) if f * p.m <= MAX_M]
        return tuple(Pattern(p.n * (f if self.schedule == "geometric" else 1), p.m * f) for f in sizes)

    @cached_property
    def stages(self) -> tuple[tuple[int, Stage], ...]:
        """Phase 0 dense, then phase 1 with the mask of each frame."""
        start, end = phases("SdGf", self.total_steps, self.start, self.end)
        frames, rule, plan = self.frames(), UpdateRule(masked=True), packing(self.packed, self.pattern)
        stages: list[tuple[int, Stage]] = [(0, Stage(phase=0))]
        for i, p in enumerate(frames):
            reason = "" if p is frames[-1] else f"is still at {p}"
            stage = Stage(phase=1, transform=HardMask(p, chain=self.gradient == "chain"), rule=rule, plan=plan, not_ready=reason)
            stages.append((start + round(i * (end - start) / len(frames)), stage))
        return tuple(stages)

    def values(self, state: State) -> dict[str, Tensor]:
        """``frame``: 0 in the dense phase, then 1, 2, ..."""
        return {"frame": torch.tensor(state["stage"])} if state else {}

    def layer(self, pattern: Pattern, shape: tuple[int, int], transform: WeightTransform | None = None) -> LayerSetup:
        if transform is None:
            return super().layer(pattern, shape)
        frames = self.frames()
        left = len(frames) - frames.index(transform.pattern)
        if pattern != self.pattern:
            # stepwise it does not become sparser than it will be
            if self.schedule == "stepwise":
                counts = [max(pattern.n, math.ceil(f.density * pattern.m)) for f in frames[:-1]]
                frames = (*(Pattern(n, pattern.m) for n in counts), pattern)
            else:
                frames = replace(self, pattern=pattern).frames()
        later = frames[-min(left, len(frames)) :]
        return LayerSetup(replace(transform, pattern=next(p for p in later if shape[1] % p.m == 0)), note=str(pattern))
