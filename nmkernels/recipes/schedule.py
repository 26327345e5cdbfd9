"""Schedules: recipes that are lists of stages, and steps as a count or as a share of the run."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..arguments import as_number
from ..gemm.plan import STRAIGHT_THROUGH, GemmPlan
from ..ops import STATS
from ..pattern import Pattern, PatternLike, RecipeError
from .contract import Observed, Recipe, Span, Stage, State, truncate

APPLIED = STATS.index("applied")
EARLY = 0.05
"""The share of a schedule that may be missing at its end before a run counts as cut short."""

PACKED = ("auto", True, False)
"""Where it is faster; in fprop, and in dgrad where the packed weight serves it; nowhere."""


def left_of(t: Tensor, end: int) -> int:
    """The steps from ``t`` to the ``end`` of a schedule; 0 where they are so few that the run does not count as cut short."""
    left = end - int(t)
    return left if left > EARLY * end else 0


def packed_only(packed: bool | str) -> str:
    """``Setup.linear_only`` of a recipe with ``packed=True``; empty for other values."""
    return "multiplies packed weights in linear layers (with packed='auto' it takes this one too)" if packed is True else ""


@dataclass(frozen=True)
class ScheduledRecipe(Recipe):
    """A recipe whose training is a list of stages, each of which begins after a number of applied steps.

    Raises:
        RecipeError: ``total_steps`` is missing and a share of it is given, or a stage has no step left.
    """

    _resume = "same"  # the steps of the checkpoint have been counted by the settings

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stages  # noqa: B018 refuses what no schedule can be made of

    @cached_property
    def stages(self) -> tuple[tuple[int, Stage], ...]:
        """(the step after which it begins, the stage), in their order; the first one begins at 0."""
        raise RecipeError(f"{type(self).__name__} defines no stages.")

    def first_state(self, group: dict[str, Any]) -> State:
        return {"t": torch.zeros((), dtype=torch.float64), "stage": passed(0, self.stages), **super().first_state(group)}

    def stage(self, state: State) -> Stage:
        return self.stages[state.get("stage", 0)][1]

    def advance(self, state: State, observed: Observed) -> bool:
        """Count the step where it was applied; the host waits for the device only at a call that can end the stage."""
        applied = observed.stats[APPLIED]
        state["t"] = state["t"].to(applied.device) + applied
        now = state["stage"]
        if now + 1 == len(self.stages) or observed.max_applied_steps < self.stages[now + 1][0]:
            return False
        state["stage"] = passed(int(state["t"].item()), self.stages)
        return bool(state["stage"] != now)

    def profile(self, steps: int) -> list[Span]:
        begins = [begin for begin, _ in self.stages]
        ends = [*begins[1:], begins[-1] + steps]
        pattern = Pattern(self.pattern)
        return truncate([stage.span(end - begin, pattern) for (begin, stage), end in zip(self.stages, ends, strict=True)], steps)


def passed(t: int, stages: Sequence[tuple[int, Any]]) -> int:
    """The index of the stage of step ``t`` + 1: the last one that begins at or before ``t``."""
    return bisect.bisect_right(stages, t, lo=1, key=lambda stage: stage[0]) - 1


def resolve_step(recipe: str, name: str, value: float | int, total_steps: int | None) -> int:
    """A step count from an int (steps) or a float in [0, 1] (a share of ``total_steps``).

    Example:
        >>> resolve_step("STEP", "t_min", 0.1, 1000), resolve_step("STEP", "t_min", 250, None)
        (100, 250)
    """
    steps = as_number(value)
    if steps is None or steps < 0 or (isinstance(steps, float) and steps > 1):
        raise RecipeError(f"{recipe}: {name}={value!r} must be a whole number of steps, or a share of the run between 0.0 and 1.0.")
    if isinstance(steps, int):
        return steps
    if total_steps is None:
        raise RecipeError(
            f"{recipe}: {name}={value} is a share of the run, so total_steps is needed; give total_steps=..., or {name} in whole steps."
        )
    return round(steps * total_steps)


def phases(recipe: str, total_steps: int | None, start: float | int, end: float | int) -> tuple[int, int]:
    """The steps of a run after which its progressive phase begins and ends, from counts or shares."""
    if total_steps is None:
        raise RecipeError(f"{recipe}: total_steps is needed, the number of optimizer steps of the whole run, to size the schedule.")
    begins, ends = resolve_step(recipe, "start", start, total_steps), resolve_step(recipe, "end", end, total_steps)
    if not begins < ends <= total_steps:
        raise RecipeError(
            f"{recipe}: start={begins} and end={ends} leave none of total_steps={total_steps} for the progressive phase between them."
        )
    return begins, ends


def packing(packed: bool | str, pattern: PatternLike, plan: GemmPlan = STRAIGHT_THROUGH) -> GemmPlan:
    """``plan``, a dense one, with the GEMMs of the weight by ``packed``; ``pattern`` is of the weights, an estimate keeps its own."""
    if not packed or (packed == "auto" and plan.fp8 is not None):  # emulated FP8 needs the dense layout
        return plan
    p = Pattern(plan.n, plan.m) if plan.m else Pattern(pattern)
    fprop, dgrad = ("auto", "auto") if packed == "auto" else ("packed", "device")
    return replace(plan, fprop=fprop, dgrad=dgrad, n=p.n, m=p.m)
