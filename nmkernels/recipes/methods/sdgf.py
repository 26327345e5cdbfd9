"""SdGf: hard masks whose pattern tightens, or refines, on the way to N:M."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...autograd import HardMask, WeightTransform
from ...optim import UpdateRule
from ...pattern import MAX_M, Pattern, RecipeError
from ..base import Observed, Recipe, Stage, State
from ..cost import Span, first
from ..packing import packing
from ..registry import recipe
from ..schedule import advance, check_choice, check_same_schedule, passed, phases

FINER = (8, 4, 2, 1)
"""Factors of the geometric frames."""


@recipe("sdgf")
@dataclass(frozen=True)
class SdGf(Recipe):
    """Structure decay gradient flow (Bambhaniya et al., "Progressive gradient flow for robust N:M sparsity training", arXiv 2402.04744).

    Forward with M_f(W) ⊙ W, M_f the mask of frame f, recomputed at every step; frames are of equal length between a dense and a
    fine-tuning phase, and end with N:M::

        stepwise   M−1 : M,  M/2 : M,  M/4 : M,  ...,  N : M      log₂(M/N) + 1 frames; 1:8 goes 7, 4, 2, 1 of 8
        geometric  8N : 8M,  4N : 4M,  2N : 2M,  N : M            the same share kept, in ever smaller groups
        densify    N : 8M,   N : 4M,   N : 2M,   N : M            from too sparse to N:M (in the public code only)

    Halves that are not whole are rounded up. A layer too narrow for the groups of a frame, or a frame with M above 256, takes the next
    one that fits. Kao et al.'s structure decay (2022, arXiv 2209.07617) is ``stepwise`` with ``dense`` > 0 and ``grad="chain"``. Works with
    any optimizer.

    Args:
        schedule: ``"stepwise"``, ``"geometric"`` or ``"densify"``.
        dense: length of the dense phase, in steps or as a share of ``total_steps``.
        fine_tune: steps, or share, added to the last frame.
        grad: ``"ste"``, the paper's: g is passed to all of W; ``"chain"`` M_f ⊙ g, as in Google's AQT.
        packed: as for ``STE``. The first frames keep too much of a weight for packed products to be faster, which ``"auto"`` knows.

    Raises:
        RecipeError: ``total_steps`` is missing, a value is out of range, or there are more frames than steps for them.

    Example:
        >>> [str(p) for p in SdGf("1:8", total_steps=100).frames()]
        ['7:8', '4:8', '2:8', '1:8']
        >>> SdGf("1:8", total_steps=100, schedule="geometric").starts()
        (0, 25, 50, 75)
    """

    paper = "Bambhaniya et al., 2024, arXiv 2402.04744"
    patterns = "any N:M; frames with M above 256 are left out"
    extra_state = "a step count"
    cost = "fprop at the N/M of each frame; a mask at every step"

    schedule: str = "stepwise"
    dense: float | int = 0
    fine_tune: float | int = 0
    grad: str = "ste"
    packed: bool | str = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("SdGf", "schedule", self.schedule, ("stepwise", "geometric", "densify"))
        check_choice("SdGf", "grad", self.grad, ("ste", "chain"))
        packing("SdGf", self.packed, self.pattern)
        starts = self.starts()
        if len(set(starts)) < len(starts):
            raise RecipeError(f"SdGf: {len(starts)} frames do not fit between the dense and the fine-tuning phase; give more steps.")

    def frames(self) -> tuple[Pattern, ...]:
        """The patterns in their order, the last one N:M."""
        p = Pattern(self.pattern)
        if self.schedule == "stepwise":
            kept, next_one = [p.m - 1] if p.m - 1 > p.n else [], (p.m + 1) // 2
            while next_one > p.n:
                kept.append(next_one)
                next_one = (next_one + 1) // 2
            return tuple(Pattern(n, p.m) for n in dict.fromkeys([*kept, p.n]))
        sizes = [f for f in FINER if f * p.m <= MAX_M]
        return tuple(Pattern(p.n * (f if self.schedule == "geometric" else 1), p.m * f) for f in sizes)

    def starts(self) -> tuple[int, ...]:
        """The step after which each frame begins."""
        first, last = phases("SdGf", self.total_steps, self.dense, self.fine_tune)
        count = len(self.frames())
        return tuple(first + round(i * (last - first) / count) for i in range(count))

    def fit(self, transform: WeightTransform, pattern: Pattern, shape: tuple[int, int]) -> WeightTransform:
        """The frame's mask, or that of the next frame whose groups divide the inputs of the layer.

        A layer with a pattern of its own goes through the frames without becoming sparser than it will be, and takes its own with
        the last one; in ever smaller groups it goes through the frames of its own.
        """
        frames = self.frames()
        left = len(frames) - frames.index(transform.pattern)
        if pattern != self.pattern:
            if self.schedule == "stepwise":
                kept = [max(pattern.n, math.ceil(f.density * pattern.m)) for f in frames[:-1]]
                frames = (*(Pattern(n, pattern.m) for n in kept), pattern)
            else:
                frames = replace(self, pattern=pattern).frames()
        later = frames[-min(left, len(frames)) :]
        return replace(transform, pattern=next(p for p in later if shape[1] % p.m == 0))

    def profile(self, steps: int) -> list[Span]:
        """Dense before the first frame, then fprop at each frame's N/M."""
        starts = self.starts()
        ends = (*starts[1:], starts[-1] + steps)
        frames = [Span(end - begin, fprop=p.density) for p, begin, end in zip(self.frames(), starts, ends, strict=True)]
        return first(steps, [Span(starts[0]), *frames])

    def start(self, group: dict[str, Any]) -> State:
        """No step taken."""
        return {"t": torch.zeros((), dtype=torch.float64), "stage": passed(0, self.starts())}

    def check_state(self, state: Any, group: dict[str, Any]) -> None:
        """Also refuse to go on under another schedule."""
        super().check_state(state, group)
        check_same_schedule(state["spec"], self.spec())

    def stage(self, state: State) -> Stage:
        """Phase 0 dense, then phase 1 with the mask of the frame."""
        now = state.get("stage", 0)
        if now == 0:
            return Stage(phase=0)
        transform = HardMask(self.frames()[now - 1], chain=self.grad == "chain")
        return Stage(phase=1, transform=transform, rule=UpdateRule(masked=True), plan=packing("SdGf", self.packed, self.pattern))

    def advance(self, state: State, observed: Observed) -> bool:
        """Count applied steps; True at the beginning of a frame."""
        return advance(state, observed, self.starts())

    def unready(self, state: State) -> str:
        """Too early before the last frame."""
        frames, now = self.frames(), state.get("stage", 0)
        return super().unready(state) or (f"is still at {frames[now - 1]}" if now < len(frames) else "")

    def metrics(self, state: State) -> dict[str, Tensor]:
        """``frame``: 0 in the dense phase, then 1, 2, ..."""
        return {"frame": torch.tensor(state["stage"])} if "stage" in state else {}
