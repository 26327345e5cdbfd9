"""One speed target, and whether measured rows meet it."""

from __future__ import annotations

from dataclasses import dataclass

from .registry import Spec

CPU = "nmkernels cpu"


@dataclass(frozen=True)
class Target:
    """One bound on one metric over some cases.

    Args:
        key: names it in ``shortfalls.txt``.
        what, against: the words of the table.
        metric, provider: of the rows that are compared with the bound.
        bound: at least this, or with ``higher=False`` at most.
        stretch: the same for the goal beyond; None where there is none.
        specs: the cases; all must meet the bound.
    """

    key: str
    what: str
    against: str
    metric: str
    bound: float
    specs: tuple[Spec, ...]
    stretch: float | None = None
    higher: bool = True
    provider: str = CPU

    def meets(self, value: float, bound: float | None = None) -> bool:
        """Whether a measured ratio, to two decimals as it is shown, meets the bound (or another one)."""
        limit = self.bound if bound is None else bound
        return round(value, 2) >= limit if self.higher else round(value, 2) <= limit


@dataclass(frozen=True)
class Verdict:
    """A target with what was measured: the ratio of each case that has a row, and why it falls short where it does."""

    target: Target
    measured: dict[Spec, float]
    reason: str

    @property
    def state(self) -> str:
        """``met``, ``stretch`` (met beyond), ``short`` or ``missing`` (a case has no row)."""
        values, t = self.measured.values(), self.target
        if any(not t.meets(v) for v in values):
            return "short"
        if len(self.measured) < len(t.specs):
            return "missing"
        return "stretch" if t.stretch is not None and all(t.meets(v, t.stretch) for v in values) else "met"
