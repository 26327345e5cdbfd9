"""Steps given as a count or as a share of the run, and schedules made of phases."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..ops import STATS
from ..pattern import CheckpointError, RecipeError
from .base import Observed, State


def resolve_step(recipe: str, name: str, value: float | int | None, total_steps: int | None) -> int | None:
    """A step count from an int (steps) or a float in [0, 1] (a share of ``total_steps``).

    Raises:
        RecipeError: a share without ``total_steps``, or a value out of range.

    Example:
        >>> resolve_step("STEP", "t_min", 0.1, 1000), resolve_step("STEP", "t_min", 250, None)
        (100, 250)
    """
    if value is None:
        return None
    if isinstance(value, bool) or not value >= 0 or (isinstance(value, float) and value > 1):
        raise RecipeError(f"{recipe}: {name}={value} must be a whole number of steps, or a share of the run between 0.0 and 1.0.")
    if isinstance(value, int):
        return value
    if total_steps is None:
        raise RecipeError(
            f"{recipe}: {name}={value} is a share of the run, so total_steps is needed; give total_steps=..., or {name} in whole steps."
        )
    return round(value * total_steps)


def check_decay(recipe: str, decay: float) -> None:
    """Raise ``RecipeError`` unless ``decay``, λ of SR-STE, is a finite number of at least 0.

    Example:
        >>> check_decay("SRSTE", 2e-4)
    """
    # infinity times a kept weight's zero would be NaN
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < math.inf:
        raise RecipeError(f"{recipe}: decay={decay!r} must be a finite number of at least 0.")


def check_count(recipe: str, name: str, value: int) -> None:
    """Raise ``RecipeError`` unless ``value`` is a whole number of at least 0.

    Example:
        >>> check_count("BiMask", "draws", 100)
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise RecipeError(f"{recipe}: {name}={value!r} must be a whole number of at least 0.")


def check_seed(recipe: str, seed: int | None) -> None:
    """Raise ``RecipeError`` unless ``seed`` is a whole number or None."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise RecipeError(f"{recipe}: seed={seed!r} must be a whole number, or None for torch's initial seed.")


class Phases(NamedTuple):
    """Where a schedule of dense, progressive and fine-tuning steps changes, in applied steps."""

    start: int
    """The dense phase ends."""
    stop: int
    """The fine-tuning begins."""


def phases(recipe: str, total_steps: int | None, dense: float | int, fine_tune: float | int) -> Phases:
    """The two changes of a run with ``dense`` steps (or share) before and ``fine_tune`` after the progressive ones.

    Raises:
        RecipeError: ``total_steps`` is missing, a length is out of range, or no step is left between them.

    Example:
        >>> phases("MdGf", 100, 0.1, 25)
        Phases(start=10, stop=75)
    """
    if total_steps is None:
        raise RecipeError(f"{recipe}: total_steps is needed, the number of optimizer steps of the whole run, to size the schedule.")
    before = resolve_step(recipe, "dense", dense, total_steps) or 0
    after = resolve_step(recipe, "fine_tune", fine_tune, total_steps) or 0
    if before + after >= total_steps:
        raise RecipeError(
            f"{recipe}: dense={before} and fine_tune={after} steps leave none of total_steps={total_steps} for the progressive phase."
        )
    return Phases(before, total_steps - after)


def passed(t: int, bounds: Sequence[int]) -> int:
    """How many of the rising ``bounds`` lie at or before step ``t``: the stage of a schedule.

    Example:
        >>> [passed(t, (10, 20)) for t in (0, 10, 19, 20)]
        [0, 1, 1, 2]
    """
    return bisect.bisect_right(bounds, t)


def advance(state: State, observed: Observed, bounds: Sequence[int]) -> bool:
    """Count one step into ``state["t"]`` where it was applied, and keep ``state["stage"]``; True when that changed.

    The host waits for the device only when as many steps were called as the next of ``bounds`` asks for.
    """
    applied = observed.stats[STATS.index("applied")]
    state["t"] = state["t"].to(applied.device) + applied
    stage = state["stage"]
    if stage == len(bounds) or observed.calls < bounds[stage]:
        return False
    state["stage"] = passed(int(state["t"].item()), bounds)
    return bool(state["stage"] != stage)


def check_choice(recipe: str, name: str, value: object, known: Sequence[str]) -> None:
    """Raise ``RecipeError`` unless ``value`` is one of ``known``."""
    if value not in known:
        raise RecipeError(f"{recipe}: {name}={value!r} is unknown; choose one of {', '.join(known)}.")


def check_same_schedule(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raise ``CheckpointError`` unless a checkpoint's recipe has the same settings; both as ``Recipe.spec`` gives them.

    How products are computed (``packed``) may change: a run may go on where other kernels are.
    """
    keys = [key for key in ours if key != "packed"]
    odd = [f"{key} is {theirs.get(key)} there and {ours[key]} here" for key in keys if theirs.get(key) != ours[key]]
    if odd:
        raise CheckpointError(f"the checkpoint was written under another schedule: {'; '.join(odd)}. Resume with the same settings.")
