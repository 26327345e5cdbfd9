"""Errors about unknown names that suggest the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The text of the error: what is unknown, what may have been meant, and what there is.

    Example:
        >>> unknown("task", "gtp", ["gpt", "vit"])
        "no task is called 'gtp'; did you mean 'gpt'? There are gpt, vit."
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"no {kind} is called {name!r}; {hint}There are {', '.join(names)}."
