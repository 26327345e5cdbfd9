"""Steps given as a count or as a share of the run."""

from __future__ import annotations

import math

from ..pattern import RecipeError


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
