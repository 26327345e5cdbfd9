"""The statistics of the page: means with Student's intervals, paired by seed, and the words for a difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtr, stdtrit

LEVEL = 0.95
"""The confidence level of every interval; tests are at 1 − LEVEL."""

FEWEST = 3
"""The fewest seeds of a mean that is shown."""

ENOUGH = 5
"""The fewest seeds of a difference that is put into words."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds.

    Args:
        mean: x̄ of the finite values; nan without any.
        error: s / √n; nan below two values.
        n: number of finite values.
        lost: number of values that were not finite (diverged runs).
    """

    mean: float
    error: float
    n: int
    lost: int = 0

    @property
    def half(self) -> float:
        """Half width of the 95 % interval, t(0.975, n − 1) · s / √n; nan below two values."""
        return float(stdtrit(self.n - 1, 0.5 + LEVEL / 2)) * self.error if self.n > 1 else math.nan

    @property
    def p(self) -> float:
        """Of the two-sided t-test that the mean is 0; nan below two values."""
        if self.n < 2:
            return math.nan
        return 2 * float(stdtr(self.n - 1, -abs(self.mean) / self.error)) if self.error else float(self.mean == 0)

    def within(self, margin: float) -> bool:
        """Whether the mean lies within ± ``margin`` by two one-sided t-tests at 5 % (TOST; Schuirmann, 1987)."""
        if self.n < 2 or self.lost:
            return False
        return abs(self.mean) + float(stdtrit(self.n - 1, LEVEL)) * self.error < margin

    def shown(self, digits: int = 3, sign: bool = False) -> str:
        """``0.059 ± 0.003``, or an empty cell below ``FEWEST`` values."""
        if self.n < FEWEST:
            return "–"
        mean = round(self.mean, digits) + 0.0  # no −0.000
        text = (f"{mean:+.{digits}f}" if sign else f"{mean:.{digits}f}").replace("-", "−")
        return f"{text} ± {self.half:.{digits}f}" + (f" ({self.lost} diverged)" if self.lost else "")


def estimate(values: Iterable[float]) -> Estimate:
    """The mean of the finite values with its standard error."""
    every = list(values)
    x = [v for v in every if math.isfinite(v)]
    n, lost = len(x), len(every) - len(x)
    if not n:
        return Estimate(math.nan, math.nan, 0, lost)
    mean = math.fsum(x) / n
    error = math.sqrt(math.fsum((v - mean) ** 2 for v in x) / (n - 1) / n) if n > 1 else math.nan
    return Estimate(mean, error, n, lost)


def combined(terms: Sequence[tuple[float, Mapping[int, float]]]) -> Estimate:
    """Σ coefficient · value, paired: over the seeds that all terms have."""
    seeds = set.intersection(*(set(values) for _, values in terms)) if terms else set()
    return estimate(sum(c * values[seed] for c, values in terms) for seed in sorted(seeds))


def verdict(e: Estimate, margin: float) -> str:
    """``level`` if surely within the margin; otherwise ``ahead`` or ``behind`` if the interval excludes 0; otherwise ``not known``.

    Also ``not known`` with fewer than ``ENOUGH`` seeds, or if a run diverged, for then the mean leaves out the worst runs.
    """
    if e.n < ENOUGH or e.lost:
        return "not known"
    if e.within(margin):
        return "level"
    if abs(e.mean) <= e.half:
        return "not known"
    return "ahead" if e.mean < 0 else "behind"


def holm(ps: Sequence[float]) -> list[float]:
    """Adjusted p-values: p̃₍ᵢ₎ = max over j ≤ i of min(1, (m − j + 1) · p₍ⱼ₎), p in ascending order (Holm, 1979).

    A contrast that is not measured yet (nan) counts in m, so that the others are not tested less strictly meanwhile.
    """
    adjusted, worst = [math.nan] * len(ps), 0.0
    for rank, i in enumerate(sorted((i for i, p in enumerate(ps) if not math.isnan(p)), key=lambda i: ps[i])):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = worst
    return adjusted
