"""The four primary contrasts, fixed before their runs. Only they are tested; everything else on the page is description."""

from __future__ import annotations

from dataclasses import dataclass

from .cells import Case, Cells, val_loss, values
from .spec import DENSE
from .stats import ENOUGH, LEVEL, Estimate, combined, estimate, holm


@dataclass(frozen=True)
class Contrast:
    """A sum of coefficient · validation loss, paired by seed, each case at its own best rate.

    Args:
        name: short, for the page's functions.
        question: the question that it answers.
        terms: (coefficient, case).
        less, more: the meaning of a sum below and above 0.
    """

    name: str
    question: str
    terms: tuple[tuple[int, Case], ...]
    less: str
    more: str


def _gap(pattern: str) -> tuple[tuple[int, Case], ...]:
    """(SR-STE − dense) under Adam, minus (SR-STE − dense) under SGD."""
    signs = {("srste", "adamw"): 1, (DENSE, "adamw"): -1, ("srste", "sgd"): -1, (DENSE, "sgd"): 1}
    return tuple((sign, Case("mlp", method, pattern, optimizer)) for (method, optimizer), sign in signs.items())


def _step(task: str, pattern: str) -> tuple[tuple[int, Case], ...]:
    """STEP − SR-STE, with T₀ at 25 %: with AutoSwitch T₀ depends on the rate, so a search would compare different methods."""
    return (1, Case(task, "step-25", pattern)), (-1, Case(task, "srste", pattern))


PRIMARY = (
    Contrast(
        "gap-1:8",
        "Does SR-STE lose more against dense under Adam than under SGD? MLP, 1:8",
        _gap("1:8"),
        "no, less",
        "yes",
    ),
    Contrast("gap-1:16", "The same, MLP, 1:16", _gap("1:16"), "no, less", "yes"),
    Contrast("step-mlp", "Is STEP (T₀ at 25 %) better than SR-STE under Adam? MLP, 1:8", _step("mlp", "1:8"), "yes", "no, worse"),
    Contrast("step-sentiment", "The same, fine-tuning BERT for sentiment, 1:4", _step("sentiment", "1:4"), "yes", "no, worse"),
)
"""At most four, so that Holm's correction leaves enough power."""


@dataclass(frozen=True)
class Finding:
    """The result of a primary contrast.

    Args:
        estimate: over the seeds that every term has.
        p: after Holm's correction over all of ``PRIMARY``.
        closed: every rate lies inside its searched grid, with two rates on each side.
        spread: how much a single run of the task changes on another machine, 0 if unknown.
    """

    contrast: Contrast
    estimate: Estimate
    p: float
    closed: bool
    spread: float = 0.0

    @property
    def significant(self) -> bool:
        """Whether there are five seeds, every rate is tuned, p is below 5 % after Holm, and the difference exceeds ``spread``."""
        enough = self.estimate.n >= ENOUGH and self.closed
        return enough and self.p < 1 - LEVEL and abs(self.estimate.mean) > self.spread

    @property
    def verdict(self) -> str:
        """The answer in words, derived from the numbers."""
        if not self.estimate.n:
            return "not run yet"
        if self.estimate.n < ENOUGH:
            return f"too few seeds yet (n = {self.estimate.n})"
        if not self.closed:
            return "undecided: a rate lies at the edge of its search"
        if abs(self.estimate.mean) <= self.spread:
            return "undecided: smaller than what another machine changes"
        if not self.p < 1 - LEVEL:
            return "no difference found"
        return self.contrast.less if self.estimate.mean < 0 else self.contrast.more


def findings(cells: Cells) -> dict[str, Finding]:
    """Every primary contrast by name, Holm-corrected over all of them, including those not measured yet."""
    found = [_estimate(cells, contrast) for contrast in PRIMARY]
    adjusted = holm([e.p for e in found])
    every = {}
    for contrast, e, p in zip(PRIMARY, found, adjusted, strict=True):
        searches = [cells.search(case) for _, case in contrast.terms]
        closed = all(search is not None and search.closed for search in searches)
        every[contrast.name] = Finding(contrast, e, p, closed, cells.spread(contrast.terms[0][1].task))
    return every


def _estimate(cells: Cells, contrast: Contrast) -> Estimate:
    return estimate(combined([(sign, values(cells.tuned(case), val_loss)) for sign, case in contrast.terms]).values())
