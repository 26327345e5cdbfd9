"""``--set KEY=VALUE``: keywords of a recipe from the command line, each as the type that the recipe's field declares."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..pattern import RecipeError
from ..recipes import Recipe
from ..recipes.registry import suggestion

BOOL = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NOT_HERE = {"pattern": "it stands behind the recipe's name, --recipe NAME:N:M", "total_steps": "it is the length of the run, --steps"}
WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "NoneType": "none"}


def options(recipe: type[Recipe], texts: Iterable[str]) -> dict[str, Any]:
    """The keywords that ``texts`` set for ``recipe``; of one given twice, the last counts.

    Raises:
        RecipeError: a text is not KEY=VALUE, the recipe has no such keyword, or the value is of another type.
    """
    return dict(_option(recipe, text) for text in texts)


def _option(recipe: type[Recipe], text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign or not key.isidentifier():
        raise RecipeError(f"--set {text}: write it as KEY=VALUE, for instance --set decay=2e-4.")
    if key in NOT_HERE:
        raise RecipeError(f"--set {text}: {key} is not set here; {NOT_HERE[key]}.")
    known = [f.name for f in fields(recipe) if f.name not in NOT_HERE]
    if key not in known:
        near = suggestion(key, known) or "."
        takes = f"It takes {', '.join(known)}" if known else "It takes none"
        raise RecipeError(
            f"--set {text}: {recipe.name} has no keyword {key!r}{near} {takes}; see `python -m nmkernels recipes {recipe.name}`."
        )
    allowed = _members(get_type_hints(recipe)[key])
    try:
        return key, _value(value, allowed)
    except ValueError as error:
        kinds = " or ".join(WORDS.get(kind.__name__, kind.__name__) for kind in allowed)
        raise RecipeError(f"--set {text}: {key} of {recipe.name} is {kinds}, and {value!r} is not.") from error


def _members(hint: Any) -> list[Any]:
    """The plain types of an annotation such as ``float | int | None``."""
    if get_origin(hint) in (Union, types.UnionType):
        return [kind for part in get_args(hint) for kind in _members(part)]
    if get_origin(hint) is Literal:
        return [str]
    return [get_origin(hint) or hint]


def _value(text: str, allowed: list[Any]) -> Any:
    word = text.strip().lower()
    if word == "none" and type(None) in allowed:
        return None
    if word in BOOL and bool in allowed:
        return BOOL[word]
    for kind in (int, float):
        if kind in allowed:
            try:
                return kind(text)
            except ValueError:
                continue
    if str in allowed:
        return text
    try:
        value = ast.literal_eval(text)  # a tuple or a table
    except (ValueError, SyntaxError):
        raise ValueError(text) from None
    if not any(isinstance(value, kind) for kind in allowed if isinstance(kind, type)):
        raise ValueError(text)
    return value
