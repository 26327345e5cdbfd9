"""Recipes inside other recipes: STEP's second phase, and what layer-wise patterns are given to."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..autograd import WeightTransform
from ..nn import ActivationRule
from ..pattern import Pattern, RecipeError
from .base import Recipe, Stage, State
from .cost import Span
from .registry import get
from .text import parse

ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
"""A parameter group, to ask a recipe for its first stage before there is an optimizer."""


def as_inner(outer: Recipe, inner: Recipe | str) -> Recipe:
    """``inner`` as a recipe with the pattern and, where it has one, the length of ``outer``.

    Args:
        inner: a recipe, or its text such as ``"mdgf"`` or ``"mdgf(fine_tune=0.25)"``; a text need not repeat pattern and total_steps.

    Raises:
        RecipeError: it has another pattern, or is no recipe.
    """
    kind, total = type(outer).__name__, outer.total_steps
    if isinstance(inner, str):
        _, pattern, options = parse(inner)
        config = {} if pattern is not None or "pattern" in options else {"pattern": outer.pattern}
        if total is not None and "total_steps" not in options:
            config["total_steps"] = total
        inner = get(inner, **config)
    if not isinstance(inner, Recipe):
        raise RecipeError(f"{kind}: inner={inner!r} must be a recipe, or its name such as 'srste' or 'mdgf(fine_tune=0.25)'.")
    if inner.pattern != outer.pattern:
        raise RecipeError(
            f"{kind}: the inner recipe {type(inner).__name__} is {inner.pattern} and {kind} itself {outer.pattern}; give both the same "
            f'pattern, as in {kind}("{inner.pattern}", inner={type(inner).__name__}("{inner.pattern}", ...)).'
        )
    return inner if total is None else of_length(inner, total)


@functools.lru_cache(maxsize=256)
def of_length(recipe: Recipe, total_steps: int) -> Recipe:
    """``recipe`` over ``total_steps`` steps.

    Raises:
        RecipeError: its schedule does not fit into so few.
    """
    return recipe if recipe.total_steps == total_steps else replace(recipe, total_steps=total_steps)


def first_state(recipe: Recipe) -> State:
    """The state in which ``recipe`` would begin under an ordinary AdamW."""
    return recipe.start(ADAMW)


def first_stage(recipe: Recipe) -> Stage:
    """The stage in which ``recipe`` would begin."""
    return recipe.stage(first_state(recipe))


@dataclass(frozen=True)
class Outer(Recipe):
    """A recipe that leaves most of what training does to an inner one."""

    def inner_at(self, state: State) -> tuple[Recipe, State]:
        """The inner recipe and its own state; an empty one stands for the time before an optimizer is attached."""
        raise RecipeError(f"{type(self).__name__} has no inner recipe.")

    def _take_over(self) -> None:
        """What users read from the class of other recipes is that of the inner one."""
        inner = self.inner_at({})[0]
        object.__setattr__(self, "final", inner.final)
        object.__setattr__(self, "mask_score", inner.mask_score)
        object.__setattr__(self, "search", inner.search)

    def of_pattern(self, pattern: Pattern) -> Recipe:
        """Both with that pattern."""
        inner = getattr(self, "inner", None)
        own: dict[str, Any] = {"inner": inner.of_pattern(pattern)} if isinstance(inner, Recipe) else {}
        return replace(self, pattern=pattern, **own)

    @property
    def freezes(self) -> str:
        """As the inner recipe does."""
        return self.inner_at({})[0].freezes

    @property
    def seed(self) -> int | None:
        """That of the inner recipe, where it has one."""
        seed: int | None = getattr(self.inner_at({})[0], "seed", None)
        return seed

    def adapter_rank(self, rows: int, cols: int) -> int:
        """As the inner recipe does."""
        return self.inner_at({})[0].adapter_rank(rows, cols)

    def unwise(self, rows: int, cols: int) -> str:
        """As the inner recipe says."""
        return self.inner_at({})[0].unwise(rows, cols)

    def deployed(self) -> Span:
        """What the inner recipe leaves."""
        return self.inner_at({})[0].deployed()

    def obstacle(self, rows: int, cols: int) -> str:
        """As the inner recipe says."""
        return self.inner_at({})[0].obstacle(rows, cols)

    def final_activation(self) -> ActivationRule | None:
        """What the inner recipe leaves."""
        return self.inner_at({})[0].final_activation()

    def layer_patterns(self, weights: Mapping[str, Tensor]) -> dict[str, Pattern] | None:
        """Those of the inner recipe."""
        return self.inner_at({})[0].layer_patterns(weights)

    def fit(self, transform: WeightTransform, pattern: Pattern, shape: tuple[int, int]) -> WeightTransform:
        """As the inner recipe does."""
        return self.inner_at({})[0].fit(transform, pattern, shape)

    def note(self, pattern: Pattern, shape: tuple[int, int]) -> str:
        """As the inner recipe does."""
        return self.inner_at({})[0].note(pattern, shape)

    def final_transform(self) -> WeightTransform:
        """As the inner recipe does."""
        return self.inner_at({})[0].final_transform()

    def inputs(self, state: State) -> dict[str, Tensor]:
        """Those of the inner recipe."""
        inner, own = self.inner_at(state)
        return inner.inputs(own)

    def settle(self, state: State, weight: Tensor, lr: float | Tensor) -> Tensor | None:
        """As the inner recipe does, once it has begun."""
        inner, own = self.inner_at(state)
        return inner.settle(own, weight, lr) if own else None

    def unready(self, state: State) -> str:
        """As the inner recipe says."""
        inner, own = self.inner_at(state)
        return inner.unready(own)

    def metrics(self, state: State) -> dict[str, Tensor]:
        """Those of the inner recipe."""
        inner, own = self.inner_at(state)
        return inner.metrics(own)
