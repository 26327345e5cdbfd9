"""Recipes by name, ``get("step:2:4", total_steps=10_000)``, and as one line of text, ``name:N:M(keyword=value, ...)``."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, TypeVar

from ..pattern import Pattern, RecipeError
from .contract import Recipe

_recipes: dict[str, type[Recipe]] = {}
R = TypeVar("R", bound=type[Recipe])
FORM = "a recipe: write it as name:N:M, or name:N:M(keyword=value, ...), for instance mdgf:1:8(end=0.75)"


def recipe(name: str) -> Callable[[R], R]:
    """Register the decorated class under ``name``: letters, digits and hyphens, so that ``text`` can be read again.

    Raises:
        RecipeError: the name has anything else in it.
    """
    if not _plain(name).isalnum():
        fits = "".join(c for c in name if c.isalnum() or c == "-")
        raise RecipeError(f"a recipe's name has letters, digits and hyphens only, got {name!r}; call it {fits!r}.")

    def register(cls: R) -> R:
        cls.name = name
        _recipes[_plain(name)] = cls
        return cls

    return register


def names() -> list[str]:
    """Names of all recipes, sorted."""
    return sorted(cls.name for cls in _recipes.values())


def _plain(name: str) -> str:
    """A name as it is found: in lower case, without hyphens."""
    return name.strip().lower().replace("-", "")


def suggestion(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'step'?"`` where one of ``known`` is close to ``word``, else nothing.

    Example:
        >>> suggestion("stpe", ["step", "asp"])
        "; did you mean 'step'?"
    """
    known = list(known)
    # difflib ranks a missing letter above two that changed places
    swapped = [name for name in known if sorted(name) == sorted(word)]
    near = swapped or difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def find(name: str) -> type[Recipe]:
    """The class registered under ``name``, in any case, with or without hyphens.

    Raises:
        RecipeError: no recipe has that name; the message suggests the nearest one.
    """
    plain = _plain(name).replace("_", "")
    if plain not in _recipes:
        near = suggestion(plain, _recipes) or "."
        raise RecipeError(
            f"no recipe is called {name!r}{near} Recipes are {', '.join(names())}, written as name:N:M, for instance step:2:4; "
            "`python -m nmkernels recipes` tells about them."
        )
    return _recipes[plain]


def get(spec: str, **config: Any) -> Recipe:
    """The recipe described by a text.

    Args:
        spec: ``"name"``, ``"name:N:M"``, or ``"name:N:M(keyword=value, ...)"`` as ``text`` writes it.
        config: the recipe's own keywords.

    Raises:
        RecipeError: no recipe has that name, or something is given twice.
        PatternError: N:M is not usable.
        TypeError: an unknown keyword.

    Example:
        >>> get("srste:2:8", decay=1e-4)
        SRSTE(pattern=Pattern("2:8"), total_steps=None, decay=0.0001, packed='auto')
    """
    name, pattern, options = parse(spec)
    cls = find(name)
    if pattern is not None:
        options = {"pattern": pattern, **options}
    for key in options.keys() & config.keys():
        what = "the pattern" if key == "pattern" else key
        raise RecipeError(f"{what} is given twice: in {spec!r} and as {key}={config[key]!r}; give it once.")
    known = [f.name for f in fields(cls) if f.init]
    for key in (*options, *config):
        if key not in known:
            near = suggestion(key, known) or "."
            raise TypeError(f"the recipe {cls.name} has no keyword {key!r}{near} It takes {', '.join(known)}.")
    return cls(**options, **config)


def resolve(spec: Recipe | str, steps: Callable[[], int] | None = None) -> Recipe:
    """A recipe, itself or by name; one that needs ``total_steps``, and whose text does not give them, gets ``steps()``."""
    if isinstance(spec, Recipe):
        return spec
    if not isinstance(spec, str):
        raise RecipeError(f"expected a recipe, or its name such as 'srste:2:4'; got {type(spec).__name__}.")
    try:
        return get(spec)
    except RecipeError:
        name, _, options = parse(spec)
        if steps is None or "total_steps" in options:
            raise
        find(name)
        return get(spec, total_steps=steps())


def parse(spec: str, form: str = FORM) -> tuple[str, str | None, dict[str, Any]]:
    """(name, pattern or None, keywords) of a recipe's text; values are plain Python literals, and words may go without quotes.
    ``form``: what the text has to be, for the error.

    Raises:
        RecipeError: it is not such a text, or gives something twice.

    Example:
        >>> parse("step:1:8(inner=mdgf(gradient=ste), t_max=0.5)")
        ('step', '1:8', {'inner': 'mdgf(gradient=ste)', 't_max': 0.5})
    """
    head, opened, rest = spec.partition("(")
    name, colon, pattern = head.strip().partition(":")
    options: dict[str, Any] = {}
    if opened:
        try:
            call = ast.parse(f"f({rest}", mode="eval").body
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args or None in [k.arg for k in call.keywords]:
                raise ValueError("keywords only")
            for keyword in call.keywords:
                key = str(keyword.arg)
                if key in options or (key == "pattern" and colon):
                    raise RecipeError(f"{'the pattern' if key == 'pattern' else key} is given twice in {spec!r}; give it once.")
                word = isinstance(keyword.value, (ast.Name, ast.Call))  # or the text of another recipe
                options[key] = ast.unparse(keyword.value) if word else ast.literal_eval(keyword.value)
        except (SyntaxError, ValueError) as error:
            raise RecipeError(f"{spec!r} is not {form}.") from error
    return name.strip(), pattern.strip() if colon else None, options


def spec(recipe: Recipe) -> dict[str, Any]:
    """A recipe as plain values, for checkpoints and logs; patterns and inner recipes as text."""
    values = {f.name: getattr(recipe, f.name) for f in fields(recipe)}
    texts = {name: str(v) if isinstance(v, Pattern) else text(v) for name, v in values.items() if isinstance(v, (Pattern, Recipe))}
    return {"recipe": recipe.name, **values, **texts}


def text(recipe: Recipe) -> str:
    """A recipe as one line that ``get`` reads, without the settings at their defaults.

    Example:
        >>> text(get("srste:2:4", total_steps=10))
        'srste:2:4(total_steps=10)'
    """
    values = spec(recipe)
    inside = ", ".join(f"{f.name}={values[f.name]!r}" for f in fields(recipe) if f.name != "pattern" and values[f.name] != f.default)
    return f"{recipe.name}:{recipe.pattern}" + (f"({inside})" if inside else "")
