"""Finds the rows of a table cell: those that differ only in the seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from .plan import ABLATED, Search, best_rates, foreseen, pending, plan, shared_rate
from .rows import RunRow
from .spec import DENSE, EVALUATION_SEEDS, RunSpec
from .stats import Estimate, combined, estimate
from .tasks.base import Settings, settings

Runs = Mapping[int, RunRow]
"""Seed -> row."""

Value = Callable[[RunRow], float]


def val_loss(row: RunRow) -> float:
    """The validation loss at the deployable weights, in nats."""
    return row.val_loss


def accuracy(row: RunRow) -> float:
    """The accuracy at the deployable weights, in percent."""
    return row.accuracy


def other_loss(row: RunRow) -> float:
    """The validation loss on a second test set, further from the training data, in nats."""
    return row.other_loss


def bleu(row: RunRow) -> float:
    """BLEU of the translations at the deployable weights."""
    return row.bleu


@dataclass(frozen=True)
class Case:
    """A training configuration without rate, length and seed. Dense training has no pattern."""

    task: str
    method: str
    pattern: str
    optimizer: str = "adamw"
    beta2: float | None = None

    @property
    def settings(self) -> Settings:
        """The task's."""
        return settings(self.task)

    @property
    def key(self) -> tuple[str, str, str, str, float]:
        """The fields that all rows of the case share."""
        beta2 = self.settings.betas[1] if self.beta2 is None else self.beta2
        pattern = DENSE if self.method == DENSE else self.pattern
        return self.task, self.method, pattern, self.optimizer, beta2 if self.optimizer == "adamw" else 0.0


class Cells:
    """All rows, found by case, rate and length.

    Args:
        rows: of ``runs.csv``.
        again: of ``repeats.csv``, some of the same runs repeated.
    """

    def __init__(self, rows: Iterable[RunRow], again: Iterable[RunRow] = ()) -> None:
        self.rows, self.again = list(rows), list(again)
        self.tasks = {row.task for row in self.rows}
        self._runs: dict[tuple[str, str, str, str, float], dict[tuple[float, int], dict[int, RunRow]]] = {}
        for row in self.rows:
            key = (row.task, row.method, row.pattern, row.optimizer, row.beta2)
            self._runs.setdefault(key, {}).setdefault((row.lr, row.steps), {})[row.seed] = row
        self._shared: dict[tuple[str, str], float | None] = {}
        self._left: dict[str, list[RunSpec]] = {}
        self._searches: dict[tuple[str, str, float, float], dict[tuple[str, str], Search]] = {}

    def at(self, case: Case, lr: float, steps: int | None = None, seeds: Collection[int] = EVALUATION_SEEDS) -> dict[int, RunRow]:
        """The runs of a case at one rate; of the task's own length by default."""
        found = self._runs.get(case.key, {}).get((lr, steps or case.settings.steps), {})
        return {seed: row for seed, row in found.items() if seed in seeds}

    def rates(self, case: Case, steps: int | None = None, seeds: Collection[int] = EVALUATION_SEEDS) -> list[float]:
        """The rates that have runs, sorted."""
        steps = steps or case.settings.steps
        return sorted(lr for (lr, length), runs in self._runs.get(case.key, {}).items() if length == steps and set(runs) & set(seeds))

    def like(self, case: Case, runs: Runs) -> dict[int, RunRow]:
        """The runs of a case at the rate and length of another case's runs."""
        return next((self.at(case, row.lr, row.steps) for row in runs.values()), {})

    def lengths(self, case: Case) -> list[int]:
        """The lengths that have runs on evaluation seeds, sorted."""
        return sorted({length for (_, length), runs in self._runs.get(case.key, {}).items() if set(runs) & set(EVALUATION_SEEDS)})

    def cases(self, task: str, optimizer: str = "adamw", beta2: float | None = None) -> list[tuple[str, str]]:
        """The (method, pattern) of a task that have runs on evaluation seeds."""
        if task not in self.tasks:
            return []
        wanted = Case(task, DENSE, DENSE, optimizer, beta2).key[3:]
        found = {(row.method, row.pattern) for row in self.rows if row.task == task and (row.optimizer, row.beta2) == wanted}
        return sorted(pair for pair in found if self.lengths(Case(task, *pair, optimizer, beta2)))

    def left(self, task: str) -> list[RunSpec]:
        """The runs of the plan that a task still lacks, assuming that every search ends where it is now."""
        if task not in self._left:
            ahead = foreseen(self.rows, task)
            runs = [spec for stage in settings(task).stages for spec in plan(stage, task, ahead)]
            self._left[task] = pending(runs, self.rows)
        return self._left[task]

    def mixed(self) -> list[str]:
        """Tasks whose rows of one β₂ come from several data sets, which must not be compared."""
        found: dict[tuple[str, bool], set[str]] = {}
        for row in self.rows:
            found.setdefault((row.task, row.beta2 == ABLATED), set()).add(row.data)
        return sorted({task for (task, _), digests in found.items() if len(digests) > 1})

    @cached_property
    def repeated(self) -> list[tuple[RunRow, RunRow]]:
        """(row, repeated row) of every run that was repeated."""
        by_key = {row.spec.key: row for row in self.rows}
        return [(by_key[row.spec.key], row) for row in self.again if row.spec.key in by_key]

    def spread(self, task: str) -> float:
        """The largest change of the validation loss when a run of a task was repeated; 0 if none was."""
        return max((abs(a.val_loss - b.val_loss) for a, b in self.repeated if a.task == task), default=0.0)

    def search(self, case: Case, steps: int | None = None) -> Search | None:
        """The finished search for the rate of a case, otherwise None; a length without a search has the rate of the task's own length.

        Args:
            steps: length of the runs; the task's own by default.
        """
        if case.task not in self.tasks:
            return None
        s = case.settings
        length = (steps or s.steps) / s.steps if s.length_search else 1.0
        key = (case.task, case.optimizer, case.key[4], length)
        if key not in self._searches:
            self._searches[key] = best_rates(self.rows, case.task, case.optimizer, case.key[4], length)
        found = self._searches[key].get((case.method, case.key[2]))
        return found if found and found.over and math.isfinite(found.rate) else None

    def tuned(self, case: Case, steps: int | None = None) -> dict[int, RunRow]:
        """The runs of a case at its best rate; empty before the search has ended."""
        found = self.search(case, steps)
        return self.at(case, found.rate, steps) if found else {}

    def shared(self, case: Case) -> dict[int, RunRow]:
        """The runs of a case at the best rate of dense training."""
        if case.task not in self.tasks:
            return {}
        key = (case.task, case.optimizer)
        if key not in self._shared:
            self._shared[key] = shared_rate(self.rows, *key)
        lr = self._shared[key]
        return self.at(case, lr) if lr else {}


def values(runs: Runs, value: Value = val_loss) -> dict[int, float]:
    """Seed -> value."""
    return {seed: value(row) for seed, row in runs.items()}


def mean(runs: Runs, value: Value = val_loss) -> Estimate:
    """The mean over seeds, without runs that diverged."""
    return estimate(values(runs, value).values())


def difference(ours: Runs, theirs: Runs, value: Value = val_loss) -> Estimate:
    """``ours`` minus ``theirs``, paired by seed, over runs on the same data."""
    ours = {seed: row for seed, row in ours.items() if seed not in theirs or theirs[seed].data == row.data}
    return estimate(combined([(1, values(ours, value)), (-1, values(theirs, value))]).values())
