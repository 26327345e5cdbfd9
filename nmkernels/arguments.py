"""Numbers that users pass: NumPy's and tensors of one integer count as the int that they hold; anything else is refused in one sentence.
And names of layers that they pass, with wildcards.

Callers pass the class of the error, so that this module needs only the standard library and every other one can import it.
"""

from __future__ import annotations

import math
import operator
from fnmatch import fnmatchcase
from numbers import Real


def as_int(value: object) -> int | None:
    """A whole number of any type as an int; None for anything else, such as 4.0, True or text."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):  # a tensor of True has an __index__ too
        return None
    try:
        return int(operator.index(value))  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # RuntimeError: a tensor on the meta device
        return None


def as_number(value: object) -> float | int | None:
    """A finite number of any type as an int if it is whole, else as a float; None for anything else."""
    integer = as_int(value)
    if integer is not None or isinstance(value, bool) or not isinstance(value, Real):
        return integer
    return float(value) if math.isfinite(value) else None


def whole_number(error: type[Exception], what: str, value: object, least: int | None = 1, also: str = "") -> int:
    """``value`` as an int; raise ``error`` unless it is a whole number of at least ``least``, None for any.

    Args:
        what: the argument as messages name it, ``"tune: tokens"``.
        also: what else the argument may be.

    Example:
        >>> whole_number(ValueError, "tune: tokens", 1.5)
        Traceback (most recent call last):
        ValueError: tune: tokens=1.5 must be a whole number of at least 1.
    """
    number = as_int(value)
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f" of at least {least}"
        raise error(f"{what}={value!r} must be a whole number{bound}{also and f', or {also}'}.")
    return number


def finite_number(error: type[Exception], what: str, value: object, least: float | None = 0, most: float = math.inf) -> float | int:
    """``value`` as a float or int; raise ``error`` unless it is a finite number from ``least``, None for any, to ``most``."""
    number = as_number(value)
    if number is None or (least is not None and number < least) or number > most:
        bound = "" if least is None else f" of at least {least}" if most == math.inf else f" from {least} to {most}"
        raise error(f"{what}={value!r} must be a finite number{bound}.")
    return number


def skips(layer: str, name: str) -> bool:
    """Whether ``name``, a full name, a part of one between dots, or either with shell wildcards, names ``layer``."""
    return fnmatchcase(f".{layer}.", f"*.{name}.*")
