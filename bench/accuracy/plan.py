"""The search for the learning rate of a case, and the runs that a case still needs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from .rows import RunRow
from .spec import DENSE, EVALUATION_SEEDS, TUNING_SEEDS, Case, RunSpec
from .stats import estimate
from .tasks.base import settings

GRID = tuple(float(f"{digit}e{power}") for power in range(-6, 2) for digit in (1, 1.7, 3, 5.5))
"""The learning rates: four a decade, each about √3 times the one before."""

ERRORS = 2.0
"""A rate is as good as the best one if it loses at most so many standard errors of the paired difference."""

MOST_RATES = 11
"""The most rates of a search: the tuning budget of every method."""

Losses = Mapping[float, Mapping[int, float]]
"""Rate -> tuning seed -> validation loss, infinite for a run that diverged."""


@dataclass(frozen=True)
class Search:
    """The state of the search for one learning rate.

    Args:
        best: the rate of least mean loss; nan before the first rates are finished.
        good: the rates as good as the best one, which are all evaluated.
        tried: all finished rates, sorted.
        todo: the rates to run next; empty when the search is over.
    """

    best: float = math.nan
    good: tuple[float, ...] = ()
    tried: tuple[float, ...] = ()
    todo: tuple[float, ...] = ()

    @property
    def closed(self) -> bool:
        """Whether worse rates were tried on both sides of the good ones."""
        return bool(self.good) and self.tried[0] < self.good[0] and self.good[-1] < self.tried[-1]


def neighbour(lr: float, up: bool) -> float:
    """The next rate of the grid."""
    return GRID[GRID.index(lr) + (1 if up else -1)]


def search(losses: Losses, start: float, seeds: int, rates: tuple[float, ...] = ()) -> Search:
    """The state of a search over the first ``seeds`` tuning seeds, from the losses so far.

    It begins with ``start`` and its neighbours, and goes on until the rates as good as the best one have worse neighbours on both sides, or
    ``MOST_RATES`` have been tried. With ``rates`` it tries these alone, and if there is one only, nothing.
    """
    if len(rates) == 1:
        return Search(rates[0], rates, rates)
    done = {lr: found for lr, found in losses.items() if len(found) >= seeds}
    first = [lr for lr in rates or (neighbour(start, up=False), start, neighbour(start, up=True)) if lr not in done]
    if first:
        return Search(tried=tuple(sorted(done)), todo=tuple(first))
    means = {lr: sum(found.values()) / len(found) for lr, found in done.items()}
    best, tried = min(means, key=lambda lr: (means[lr], lr)), tuple(sorted(done))
    good = tuple(lr for lr in tried if lr == best or _as_good(done[lr], done[best]))
    todo = tuple(lr for lr in (neighbour(good[0], up=False), neighbour(good[-1], up=True)) if lr not in done and not rates)
    return Search(best, good, tried, todo[: max(0, MOST_RATES - len(tried))])


def _as_good(found: Mapping[int, float], best: Mapping[int, float]) -> bool:
    worse = estimate(found[seed] - best[seed] for seed in found)
    return not worse.lost and worse.mean <= ERRORS * worse.error


def tuned_by(case: Case) -> Case:
    """The case whose runs choose the rates of ``case``: itself, or dense training if the runs are longer than the task's own.

    Searching in long runs costs too much to do it for every method, and STEP's paper makes its claim at the rates of dense training.
    """
    return case if case.steps <= settings(case.task).steps else replace(case, method=DENSE)


@dataclass
class Results:
    """The rows, found by case."""

    rows: Iterable[RunRow]
    cases: dict[Case, dict[float, dict[int, RunRow]]] = field(init=False)

    def __post_init__(self) -> None:
        self.cases = defaultdict(lambda: defaultdict(dict))
        for row in self.rows:
            self.cases[row.case][row.lr][row.seed] = row

    def search(self, case: Case) -> Search:
        """The search for a case's rate, in the runs of ``tuned_by(case)``."""
        case = tuned_by(case)
        s, found = settings(case.task), self.cases.get(case, {})
        seeds = TUNING_SEEDS[: s.tuning_seeds]
        losses = {lr: {k: _loss(runs[k]) for k in seeds if k in runs} for lr, runs in found.items()}
        start = s.lr if case.optimizer == "adamw" else s.lr_sgd
        return search({lr: mine for lr, mine in losses.items() if mine}, start, len(seeds), s.rates)

    def evaluated(self, case: Case) -> dict[float, dict[int, RunRow]]:
        """Rate -> evaluation seed -> row, for the good rates of a search that is over."""
        found = self.search(case)
        if found.todo:
            return {}
        runs = {lr: {k: row for k, row in self.cases[case][lr].items() if k in EVALUATION_SEEDS} for lr in found.good}
        return {lr: mine for lr, mine in runs.items() if mine}

    def best(self, case: Case) -> dict[int, RunRow]:
        """The evaluation runs of a case at the rate that is best on them; of rates with fewer seeds only if there is no other."""
        runs = self.evaluated(case)
        if not runs:
            return {}
        most = max(map(len, runs.values()))
        return min((mine for mine in runs.values() if len(mine) == most), key=mean_loss)

    def todo(self, case: Case, seeds: int | None = None) -> list[RunSpec]:
        """The runs that a case needs now: of its search, and when that is over, of its evaluation on the first ``seeds`` seeds."""
        s, found = settings(case.task), self.search(case)
        if found.todo:
            case, rates, wanted = tuned_by(case), found.todo, TUNING_SEEDS[: s.tuning_seeds]
        else:
            rates, wanted = found.good, EVALUATION_SEEDS[: seeds or s.seeds]
        have = self.cases.get(case, {})
        return [RunSpec(case, lr, seed) for seed in wanted for lr in rates if seed not in have.get(lr, {})]

    def foreseen(self, case: Case) -> int:
        """About how many runs are left: a search is taken to need five rates, and to find two of them good, on one seed the best."""
        s, found = settings(case.task), self.search(case)
        if not found.todo:
            return len(self.todo(case))
        rates = (len(found.todo) if s.rates else max(2, 5 - len(found.tried))) if case == tuned_by(case) else 0
        return rates * s.tuning_seeds + min(2, s.tuning_seeds) * s.seeds


def _loss(row: RunRow) -> float:
    return row.val_loss if math.isfinite(row.val_loss) else math.inf


def mean_loss(runs: Mapping[int, RunRow]) -> float:
    """The mean validation loss; infinite if a run diverged."""
    return sum(map(_loss, runs.values())) / len(runs)


def cost(case: Case, runs: int) -> float:
    """CPU-hours of one core."""
    s = settings(case.task)
    return s.seconds * case.steps / s.steps * runs / 3600
