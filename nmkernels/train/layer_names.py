"""Names of layers: as messages list them, and one check for all arguments that name layers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

from ..arguments import skips as skips
from ..pattern import RecipeError
from ..recipes.registry import suggestion

SHOWN = 3
"""The number of names that a message lists."""


def listed(names: Iterable[str]) -> str:
    """Layers as a message names them: the first three, and how many more."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"layer{'s' * (len(names) > 1)} {', '.join(map(repr, names[:SHOWN]))}{more}" if names != [""] else "the model"


def check_names(
    what: str, names: Iterable[str], known: Iterable[str], matches: Callable[[str, str], bool] = operator.eq, kind: str = "layer"
) -> None:
    """Raise ``RecipeError`` if one of ``names`` matches none of the ``known`` ones, with a similar name that does.

    Args:
        what: the argument as messages name it, ``"audit: rows"``.
        matches: ``matches(known, name)``, for names that are wildcards, or parts of the known ones.
        kind: what is named.
    """
    known = list(known)
    for name in names:
        if not any(matches(one, name) for one in known):
            parts = [one.split(".") for one in known]
            words = {*known, *(part for one in parts for part in one), *(".".join(one[:i]) for one in parts for i in range(1, len(one)))}
            near = suggestion(str(name), sorted(word for word in words if any(matches(one, word) for one in known)))
            shown = [*filter(None, known)]
            more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
            some = f", only {', '.join(map(repr, shown[:SHOWN])) or 'the model itself'}{more}."
            raise RecipeError(f"{what} names {name!r}, which matches no {kind} of the model{near or some}")
