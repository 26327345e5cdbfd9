"""Means with their standard errors."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error, s / √n; the error of a single value is nan.

    Example:
        >>> mean_and_error([1.0, 3.0])
        (2.0, 1.0)
    """
    n = len(values)
    if not n:
        return math.nan, math.nan
    mean = sum(values) / n
    if n == 1:
        return mean, math.nan
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
