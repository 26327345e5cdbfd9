"""The statistics of the page: paired t intervals, Holm's correction, and interpolation that never extrapolates."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtr, stdtrit

LEVEL = 0.95
"""The confidence level of every interval on the page."""

ENOUGH = 5
"""The fewest seeds of a result."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with Student's interval.

    Args:
        mean: x̄; nan without values.
        half: half width of the 95 % interval, t(0.975, n − 1) · s / √n; nan below two values.
        n: number of finite values.
        p: of the two-sided t-test that the mean is 0; nan below two values.
        lost: number of values that were not finite (diverged runs), which the other fields do not include.
    """

    mean: float
    half: float
    n: int
    p: float
    lost: int = 0

    @property
    def clear(self) -> bool:
        """Whether the interval excludes 0."""
        return abs(self.mean) > self.half

    def shown(self, digits: int = 3, sign: bool = False) -> str:
        """``0.059 ± 0.003``, or the mean alone if there is no interval.

        Example:
            >>> estimate([1.0, 2.0, 3.0]).shown(2, sign=True)
            '+2.00 ± 2.48'
        """
        if not self.n:
            return "–"
        mean = round(self.mean, digits) + 0.0  # no −0.000
        text = f"{mean:+.{digits}f}" if sign else f"{mean:.{digits}f}"
        return text.replace("-", "−") + (f" ± {self.half:.{digits}f}" if math.isfinite(self.half) else "")


def estimate(values: Iterable[float]) -> Estimate:
    """The mean of the finite values, with the interval and the test of a one-sample t-test (Student, 1908)."""
    every = list(values)
    x = [v for v in every if math.isfinite(v)]
    n, lost = len(x), len(every) - len(x)
    if not n:
        return Estimate(math.nan, math.nan, 0, math.nan, lost)
    mean = math.fsum(x) / n
    if n == 1:
        return Estimate(mean, math.nan, 1, math.nan, lost)
    error = math.sqrt(math.fsum((v - mean) ** 2 for v in x) / (n - 1) / n)
    half = float(stdtrit(n - 1, 0.5 + LEVEL / 2)) * error
    p = 2 * float(stdtr(n - 1, -abs(mean) / error)) if error else float(mean == 0)
    return Estimate(mean, half, n, p, lost)


def combined(terms: Sequence[tuple[float, Mapping[int, float]]]) -> dict[int, float]:
    """Σ coefficient · value for each seed that all terms have, for a paired estimate.

    Args:
        terms: (coefficient, seed -> value). A value that is not finite is kept as nan, so that ``estimate`` counts it.

    Example:
        >>> combined([(1, {0: 5.0, 1: 7.0}), (-1, {1: 4.0, 2: 9.0})])
        {1: 3.0}
    """
    seeds = set.intersection(*(set(values) for _, values in terms)) if terms else set()
    sums = {seed: sum(c * values[seed] for c, values in terms) for seed in sorted(seeds)}
    return {seed: value if math.isfinite(value) else math.nan for seed, value in sums.items()}


def holm(ps: Sequence[float]) -> list[float]:
    """Adjusted p-values: p̃₍ᵢ₎ = max over j ≤ i of min(1, (m − j + 1) · p₍ⱼ₎), p in ascending order (Holm, 1979).

    A contrast that is not measured yet (nan) counts in m, so that the others are not tested less strictly meanwhile.

    Example:
        >>> [round(p, 6) for p in holm([0.01, 0.04, 0.03, 0.005])]
        [0.03, 0.06, 0.06, 0.02]
    """
    adjusted, worst = [math.nan] * len(ps), 0.0
    for rank, i in enumerate(sorted((i for i, p in enumerate(ps) if not math.isnan(p)), key=lambda i: ps[i])):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = worst
    return adjusted


def interpolate(points: Mapping[float, float], x: float) -> float:
    """Interpolate linearly in log x between ``points``.

    Raises:
        ValueError: ``x`` lies outside the points; there is no extrapolation.

    Example:
        >>> interpolate({1.0: 3.0, 4.0: 1.0}, 2.0)
        2.0
    """
    xs = sorted(points)
    if not xs or not xs[0] <= x <= xs[-1]:
        raise ValueError(f"{x:g} lies outside the points at {', '.join(f'{p:g}' for p in xs) or 'none'}")
    at = bisect.bisect_left(xs, x)
    if xs[at] == x:
        return points[x]
    low, high = xs[at - 1], xs[at]
    share = math.log(x / low) / math.log(high / low)
    return points[low] + share * (points[high] - points[low])
