"""Settings of a recipe: fields that say what values fit, which ``Recipe`` checks, and whether a resumed run may have another."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import field
from typing import Any


def setting(default: Any, fits: Callable[[Any], bool] = lambda value: True, wanted: str = "", resume: str = "") -> Any:
    """A field whose value ``fits``; of another one the error says ``name=value`` and what is ``wanted``.

    Args:
        resume: ``"any"``: a resumed run may have it otherwise than its checkpoint; ``"same"``: it may not. By default it may not in a
            ``ScheduledRecipe``, whose steps have been counted by it.
    """
    return field(default=default, metadata={"fits": fits, "wanted": wanted, **({"resume": resume} if resume else {})})


def number(default: float | None, above: bool = False, none: str = "") -> Any:
    """A finite number of at least 0 or ``above`` it, as infinity times a kept weight's zero would be NaN; ``none`` as for ``count``."""

    def fits(x: Any) -> bool:
        return (isinstance(x, float) or whole(x)) and 0 <= x < math.inf and not (above and x == 0)

    return _or_none(default, fits, f"must be a finite number {'above' if above else 'of at least'} 0", none)


def count(default: int | None, least: int = 0, none: str = "", resume: str = "") -> Any:
    """A whole number of at least ``least``, or None where ``none`` says what that is for."""
    return _or_none(default, lambda x: whole(x) and x >= least, f"must be a whole number of at least {least}", none, resume)


def choice(default: Any, *others: Any, resume: str = "") -> Any:
    """One of the given values, the first one by default."""
    known = (default, *others)
    return setting(default, lambda x: x in known, f"is unknown; choose one of {', '.join(map(str, known))}", resume)


def flag(default: bool) -> Any:
    """True or False, and not 1 or 0."""
    return setting(default, lambda x: isinstance(x, bool), "must be True or False")


def optional_seed() -> Any:
    """A whole number, or None for torch's initial seed."""
    return _or_none(None, whole, "must be a whole number", "for torch's initial seed")


def whole(x: object) -> bool:
    """Whether ``x`` is a whole number, which True and False are not."""
    return isinstance(x, int) and not isinstance(x, bool)


def _or_none(default: Any, fits: Callable[[Any], bool], wanted: str, none: str, resume: str = "") -> Any:
    if not none:
        return setting(default, fits, wanted, resume)
    return setting(default, lambda x: x is None or fits(x), f"{wanted}, or None {none}", resume)
