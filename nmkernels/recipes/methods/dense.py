"""Dense: the baseline that every other recipe is compared with."""

from __future__ import annotations

from dataclasses import dataclass

from ..contract import About, Recipe, Stage, State
from ..registry import recipe


@recipe("dense")
@dataclass(frozen=True)
class Dense(Recipe):
    """Ordinary dense training through the same code path: y = x Wᵀ + b, no mask, no decay.

    Example:
        >>> Dense().stage({}).phase
        0
    """

    about = About("none: the baseline", "any N:M, which only chooses the layers", cost="that of dense training")
    final = "dense"

    def stage(self, state: State) -> Stage:
        return Stage(phase=0)
