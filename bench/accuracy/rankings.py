"""The best method for each task and sparsity, and comparisons of methods, as tables and phrases."""

from __future__ import annotations

from typing import NamedTuple

from . import tasks
from .cells import Case, Cells, Runs, difference, mean
from .contrasts import findings
from .spec import DENSE, TUNING_SEEDS
from .stats import ENOUGH, Estimate
from .tables import BASELINE, NONE, below, curve, grid, in_short, less_at, planned, smallest_and_best, table
from .tasks.base import settings

CONTROL = "-thawed"
"""Suffix of controls, which explain a method but are not methods themselves."""


def candidates(cells: Cells, task: str, pattern: str) -> dict[str, Runs]:
    """The methods with runs at their own rate, without dense training, controls, and those that diverged on a seed.

    If some have five seeds, those with fewer are left out.
    """
    names = [name for name in grid(cells, task, "adamw", None, ())[0] if name != DENSE and not name.endswith(CONTROL)]
    tuned: dict[str, Runs] = {name: cells.tuned(Case(task, name, pattern)) for name in names}
    sure = {name: runs for name, runs in tuned.items() if mean(runs).n and not mean(runs).lost}
    return {name: runs for name, runs in sure.items() if len(runs) >= ENOUGH} or sure


def best_methods(cells: Cells, brief: bool = False) -> str:
    """Per task and pattern: the method of least loss at its own rate, those not distinguishable from it, and the difference to dense.

    Args:
        brief: only methods with five seeds and a closed search, without the comparison at equal FLOPs.
    """
    head = ["task", "pattern", "least loss", "not distinguishable from it", "its loss minus dense's"]
    lines = [[*head, *([] if brief else ["the same at equal training FLOPs"]), "n"]]
    for task in tasks.names():
        for pattern in grid(cells, task, "adamw", None, ())[1]:
            if found := candidates(cells, task, pattern):
                lines += _line(cells, task, pattern, found, brief)
    return table(lines) if len(lines) > 1 else "*Not run yet: `python -m bench.accuracy status` shows what it costs.*"


def _line(cells: Cells, task: str, pattern: str, found: dict[str, Runs], brief: bool) -> list[list[str]]:
    best = min(found, key=lambda name: mean(found[name]).mean)
    least = mean(found[best])
    search = cells.search(Case(task, best, pattern))
    closed = search is not None and search.closed
    if brief and (least.n < ENOUGH or not closed):
        return []
    level = ", ".join(f"`{name}`" for name in found if name != best and _level(found[name], found[best])) or "none"
    dense = difference(found[best], cells.tuned(Case(task, DENSE, DENSE)))
    line = [
        f"`{task}`, {settings(task).steps} steps",
        pattern,
        f"`{best}` {least.shown()}" + ("" if closed else ", open"),
        level if least.n >= ENOUGH else "too few seeds to say",
        dense.shown(sign=True) + below(cells, task, dense) if dense.n else NONE,
        *([] if brief else [_equal(cells, task, pattern, best)]),
        str(least.n) if least.n >= planned(task) else f"{least.n} of {planned(task)}",
    ]
    return [line]


def _level(ours: Runs, least: Runs) -> bool:
    delta = difference(ours, least)
    return delta.n < ENOUGH or not delta.clear


def _equal(cells: Cells, task: str, pattern: str, name: str) -> str:
    dense, ours = curve(cells, Case(task, DENSE, DENSE)), curve(cells, Case(task, name, pattern))
    if not dense or not ours:
        return NONE
    budget = min(flops for points in dense.values() for flops in points)
    e = less_at(ours, dense, budget)
    return e.shown(sign=True) + (f", n = {e.n}" if e.n < planned(task) else "") if e.n else NONE


def compare(cells: Cells, task: str, pattern: str, ours: str, theirs: str = BASELINE, optimizer: str = "adamw") -> str:
    """``ours`` compared with ``theirs`` at their own rates, in words derived from the interval."""
    a, b = (cells.tuned(Case(task, name, pattern, optimizer)) for name in (ours, theirs))
    return in_words(difference(a, b), f"`{theirs}`", cells.spread(task))


def in_words(e: Estimate, other: str, spread: float = 0.0) -> str:
    """A difference of losses as a phrase: ahead of, behind, or not distinguishable from ``other``.

    Example:
        >>> in_words(Estimate(0.5, 0.25, 6, 0.002), "dense")
        'behind dense by 0.500 ± 0.250 (n = 6)'
    """
    if not e.n:
        return f"not compared with {other} yet"
    if e.n < ENOUGH:
        return f"not ranked against {other} yet ({e.shown(sign=True)}, n = {e.n})"
    if not e.clear or abs(e.mean) <= spread:
        return f"not distinguishable from {other} ({e.shown(sign=True)}, n = {e.n})"
    size = Estimate(abs(e.mean), e.half, e.n, e.p).shown()
    return f"{'ahead of' if e.mean < 0 else 'behind'} {other} by {size} (n = {e.n})"


class Tally(NamedTuple):
    """The tasks where a method is ahead of another, behind it, or not distinguishable from it, as text for a sentence."""

    ahead: str
    behind: str
    level: str


def everywhere(cells: Cells, ours: str, theirs: str = BASELINE) -> Tally:
    """``compare`` over every task and pattern where both have five seeds at their own rates."""
    found: dict[str, list[str]] = {"ahead": [], "behind": [], "level": []}
    for task in tasks.names():
        for pattern in grid(cells, task, "adamw", None, ())[1]:
            e = difference(cells.tuned(Case(task, ours, pattern)), cells.tuned(Case(task, theirs, pattern)))
            if e.n >= ENOUGH:
                clear = e.clear and abs(e.mean) > cells.spread(task)
                found[("ahead" if e.mean < 0 else "behind") if clear else "level"].append(f"`{task}` {pattern} ({e.shown(sign=True)})")
    return Tally(*(", ".join(names) for names in found.values()))


class Longer(NamedTuple):
    """A method's loss minus dense's as runs get longer, as text for a sentence.

    Args:
        method: the method of least loss at the task's own length.
        steps: the difference after the same number of steps.
        flops: the difference at the same training FLOPs, if both have runs on both sides.
        overtaken: whether it is ahead after the shortest runs and behind after the longest, both beyond their intervals.
    """

    method: str
    steps: str
    flops: str
    overtaken: bool


def longer(cells: Cells, task: str, pattern: str) -> Longer | None:
    """The method of least loss in longer runs; None if there are none."""
    dense, found = Case(task, DENSE, DENSE), candidates(cells, task, pattern)
    if not found:
        return None
    ours = Case(task, min(found, key=lambda name: mean(found[name]).mean), pattern)
    lengths = [steps for steps in cells.lengths(dense) if cells.tuned(ours, steps)]
    if len(lengths) < 2:
        return None
    after = [difference(cells.tuned(ours, steps), cells.tuned(dense, steps)) for steps in lengths]
    points, theirs = curve(cells, ours), curve(cells, dense)
    budgets = {steps: row.training_flops for steps in cells.lengths(dense) for row in cells.tuned(dense, steps).values()}

    def listed(found: dict[str, Estimate]) -> str:
        return ", ".join(f"{e.shown(sign=True)} {where} (n = {e.n})" for where, e in found.items() if e.n)

    return Longer(
        ours.method,
        listed({f"after {steps} steps": e for steps, e in zip(lengths, after, strict=True)}),
        listed({f"at dense's of {steps} steps": less_at(points, theirs, budget) for steps, budget in budgets.items()}),
        after[0].clear and after[-1].clear and after[0].mean < 0 < after[-1].mean,
    )


def same_rate(cells: Cells, task: str, pattern: str, method: str) -> str:
    """``method`` minus SR-STE at the smallest rate searched and at SR-STE's best, and SR-STE's own change between those rates.

    On the tuning seeds, which have runs at every rate.
    """
    ours, base = Case(task, method, pattern), Case(task, BASELINE, pattern)
    rates = smallest_and_best(cells, task, pattern)
    shared = [lr for lr in rates if cells.at(ours, lr, seeds=TUNING_SEEDS)]
    if len(shared) < 2:
        return "not compared yet"
    low, best = ((cells.at(base, lr, seeds=TUNING_SEEDS), cells.at(ours, lr, seeds=TUNING_SEEDS)) for lr in shared)
    at_low, at_best, moved = difference(low[1], low[0]), difference(best[1], best[0]), difference(best[0], low[0])
    return (
        f"{at_low.shown(sign=True)} at {shared[0]:g}, {at_best.shown(sign=True)} at {shared[1]:g}, SR-STE's best; "
        f"SR-STE's own loss at {shared[1]:g} minus that at {shared[0]:g} is {moved.shown(sign=True)} (n = {moved.n})"
    )


def at_chance(cells: Cells, task: str, chance: float, within: float = 3.0) -> str:
    """The methods with runs at their own rate that ended at chance: how many did, and how many of the search's at that rate.

    Args:
        chance: accuracy of guessing, in percent.
        within: points from it that still count as chance.
    """

    def lost(runs: Runs) -> int:
        return sum(abs(row.accuracy - chance) <= within for row in runs.values())

    found = []
    for case in (Case(task, *pair) for pair in cells.cases(task)):
        runs, search = cells.tuned(case), cells.search(case)
        if search and lost(runs):
            tuning = cells.at(case, search.rate, settings(task).tune_steps, TUNING_SEEDS)
            share = f"{lost(runs)} of {len(runs)} of `{case.method}` at {case.pattern}"
            found.append(f"{share} ({lost(tuning)} of {len(tuning)} in the search)")
    return ", ".join(found) or "none"


def finding(cells: Cells, name: str) -> str:
    """The answer to a primary contrast with its numbers."""
    found = findings(cells)[name]
    if not found.estimate.n:
        return found.verdict
    p = in_short(found.p)
    p = p if p.startswith("<") else f"= {p}"
    return f"{found.verdict} ({found.estimate.shown(sign=True)}, n = {found.estimate.n}, p {p} after Holm)"
