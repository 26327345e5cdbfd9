"""Dense: the twin that every other recipe is compared with."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import Recipe, Stage, State
from ..registry import recipe


@recipe("dense")
@dataclass(frozen=True)
class Dense(Recipe):
    """Ordinary dense training through the same code path: y = x Wᵀ + b, no mask, no decay.

    Example:
        >>> Dense().stage({}).phase
        0
    """

    paper = "none: the baseline"
    patterns = "any N:M, which only chooses the layers"
    extra_state = "none"
    cost = "that of dense training"

    final = "dense"

    def stage(self, state: State) -> Stage:
        """Always phase 0, the weight as it is."""
        return Stage(phase=0)
