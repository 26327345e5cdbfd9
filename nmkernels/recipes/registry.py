"""Recipes by name: ``get("step:2:4", total_steps=10_000)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..pattern import RecipeError
from .base import Recipe

_recipes: dict[str, type[Recipe]] = {}
R = TypeVar("R", bound=type[Recipe])


def recipe(name: str) -> Callable[[R], R]:
    """Register the decorated class under ``name``."""

    def register(cls: R) -> R:
        cls.name = name
        _recipes[name] = cls
        return cls

    return register


def names() -> list[str]:
    """Names of all recipes, sorted.

    Example:
        >>> "step" in names()
        True
    """
    return sorted(_recipes)


def get(spec: str, **config: Any) -> Recipe:
    """The recipe that a text names.

    Args:
        spec: ``"name"`` or ``"name:N:M"``.
        config: the recipe's own keywords.

    Raises:
        RecipeError: no recipe has that name, or the pattern is given twice. PatternError: N:M is not usable. TypeError: an unknown keyword.

    Example:
        >>> get("srste:2:8", decay=1e-4)
        SRSTE(pattern=Pattern("2:8"), total_steps=None, decay=0.0001)
    """
    name, colon, pattern = spec.partition(":")
    cls = _recipes.get(name.strip().lower().replace("-", "").replace("_", ""))
    if cls is None:
        raise RecipeError(f"no recipe is called {name!r}; recipes are {', '.join(names())}, written as name:N:M, for instance step:2:4.")
    if colon and "pattern" in config:
        raise RecipeError(f"the pattern is given twice: in {spec!r} and as pattern={config['pattern']!r}; give it once.")
    if colon:
        config = {"pattern": pattern, **config}
    return cls(**config)


def resolve(spec: Recipe | str) -> Recipe:
    """A recipe given as such or by name."""
    if isinstance(spec, Recipe):
        return spec
    if isinstance(spec, str):
        return get(spec)
    raise RecipeError(f"a recipe is wanted, or its name such as 'srste:2:4'; got {type(spec).__name__}.")
