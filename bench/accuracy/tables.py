"""Tables of the page: means over seeds, paired differences, and what each run costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from . import methods
from .plan import best_rates
from .rows import RunRow
from .spec import DENSE, EVALUATION_SEEDS, RunSpec, mean_and_error
from .tasks.base import settings

BASELINE = "srste"
"""The method that the others are compared with, seed by seed."""

LATE = 0.8
"""The share of a run's steps after which it counts as late."""

Value = Callable[[RunRow], float]


def val_loss(row: RunRow) -> float:
    """The validation loss at the deployable weights."""
    return row.val_loss


def accuracy(row: RunRow) -> float:
    """The accuracy at the deployable weights, in percent."""
    return row.accuracy


@dataclass(frozen=True)
class Cases:
    """The runs behind one table: (method, pattern) -> seed -> row, on the evaluation seeds."""

    runs: dict[tuple[str, str], dict[int, RunRow]]

    def of(self, method: str, pattern: str) -> dict[int, RunRow]:
        """The runs of a cell; dense ones stand for every pattern."""
        return self.runs.get((method, DENSE if method == DENSE else pattern), {})

    def methods(self) -> list[str]:
        """Those that have a run, in the order of the list of methods."""
        found = {method for method, _ in self.runs}
        return [name for name in (*methods.METHODS, *methods.others()) if name in found]

    def patterns(self) -> list[str]:
        """Those that have a run, from dense to sparse."""
        return sorted({p for _, p in self.runs if p != DENSE}, key=sparsity)


def sparsity(pattern: str) -> tuple[float, int]:
    """A key that sorts patterns from dense to sparse, and among equals by M."""
    n, m = map(int, pattern.split(":"))
    return m / n, m


def shared(rows: Iterable[RunRow], task: str) -> Cases:
    """The runs at the task's shared hyper-parameters."""
    s = settings(task)
    return _cases(row for row in rows if row.task == task and (row.lr, row.steps) == (s.lr, s.steps))


def tuned(rows: Iterable[RunRow], task: str) -> Cases:
    """The runs at the learning rate that the search found for their method and pattern."""
    rows = list(rows)
    steps, best = settings(task).steps, best_rates(rows, task)
    rates = {case: search.rate for case, search in best.items() if search.over}
    return _cases(row for row in rows if row.task == task and row.steps == steps and rates.get((row.method, row.pattern)) == row.lr)


def _cases(rows: Iterable[RunRow]) -> Cases:
    runs: dict[tuple[str, str], dict[int, RunRow]] = {}
    for row in rows:
        if row.seed in EVALUATION_SEEDS:
            runs.setdefault((row.method, row.pattern), {})[row.seed] = row
    return Cases(runs)


def paired(cases: Cases, method: str, other: str, pattern: str, value: Value = val_loss) -> tuple[float, float, int]:
    """Mean of ``method`` less ``other`` over the seeds that both have, its standard error, and their number; without diverged runs."""
    mine, theirs = cases.of(method, pattern), cases.of(other, pattern)
    both = [value(mine[s]) - value(theirs[s]) for s in sorted(set(mine) & set(theirs))]
    finite = [d for d in both if math.isfinite(d)]
    return *mean_and_error(finite), len(finite)


def results(cases: Cases, only: Sequence[str] = (), value: Value = val_loss, digits: int = 3, rates: bool = False) -> str:
    """Mean ± standard error per method and pattern, and below it the paired difference to SR-STE; bold where that is beyond two errors.

    Args:
        rates: name the learning rate in each cell.
    """
    names = [name for name in cases.methods() if not only or name in only]
    patterns = cases.patterns()
    lines = [["method", *patterns]]
    for name in names:
        lines.append([f"`{name}`", *(_cell(cases, name, p, value, digits, rates) for p in patterns)])
    return table(lines)


def _cell(cases: Cases, name: str, pattern: str, value: Value, digits: int, rates: bool) -> str:
    found = cases.of(name, pattern)
    if not found:
        return "–"
    finite = [value(row) for row in found.values() if math.isfinite(value(row))]
    mean, error = mean_and_error(finite)
    parts = [_pm(mean, error, digits)]
    if name not in (BASELINE, DENSE):
        delta, spread, n = paired(cases, name, BASELINE, pattern, value)
        if n > 1:
            text = f"{delta:+.{digits}f} ± {spread:.{digits}f}"
            parts.append(f"**{text}**" if abs(delta) > 2 * spread else text)
    if rates:
        parts.append("lr " + "/".join(sorted({f"{row.lr:g}" for row in found.values()})))
    if len(found) != len(EVALUATION_SEEDS):
        parts.append(f"n={len(found)}")
    if len(finite) < len(found):
        parts.append(f"{len(found) - len(finite)} diverged")
    return "<br>".join(parts)


def _pm(mean: float, error: float, digits: int) -> str:
    return f"{mean:.{digits}f}" + (f" ± {error:.{digits}f}" if math.isfinite(error) else "")


def costs(cases: Cases, only: Sequence[str] = ()) -> str:
    """Training FLOPs as a share of dense training's, and inference FLOPs as a share of dense's, of the model's linear layers."""
    dense = next(iter(cases.of(DENSE, "").values()), None)
    if dense is None or not dense.training_flops:
        return "No dense run to compare with yet."
    patterns = cases.patterns()
    lines = [["method", *(f"{p} training" for p in patterns), *(f"{p} inference" for p in patterns)]]
    for name in (name for name in cases.methods() if not only or name in only):
        cells = [list(cases.of(name, p).values()) for p in patterns]
        shares = [_mean(row.training_flops / dense.training_flops for row in cell) for cell in cells]
        shares += [_mean(row.inference_flops / dense.inference_flops for row in cell) for cell in cells]
        lines.append([f"`{name}`", *("–" if math.isnan(share) else f"{share:.2f}" for share in shares)])
    return table(lines)


def _mean(values: Iterable[float]) -> float:
    return mean_and_error(list(values))[0]


def switches(rows: Iterable[RunRow], task: str, only: Sequence[str] = ()) -> str:
    """Where AutoSwitch fired, in steps, over the seeds, for every variant of STEP."""
    found: dict[tuple[str, str, int], list[RunRow]] = {}
    for row in rows:
        if row.task == task and row.switch_step and row.seed in EVALUATION_SEEDS and (not only or row.method in only):
            found.setdefault((row.method, row.pattern, row.steps), []).append(row)
    lines = [["method", "pattern", "lr", "T₀ (least to most)", "of steps", "runs"]]
    for (name, pattern, length), group in sorted(found.items(), key=lambda item: (item[0][0], sparsity(item[0][1]), item[0][2])):
        steps = sorted(row.switch_step for row in group)
        rates = "/".join(f"{lr:g}" for lr in sorted({row.lr for row in group}))
        lines.append([f"`{name}`", pattern, rates, f"{steps[0]} to {steps[-1]}", str(length), str(len(group))])
    return table(lines)


def late(lines: Sequence[dict[str, str]], task: str, column: str, only: Sequence[str] = ()) -> str:
    """The mean of a column of the traces after ``LATE`` of the steps at the shared rate, per method and pattern, over runs and steps."""
    s = settings(task)
    found: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        run = RunSpec.from_key(line["run"])
        at_shared = (run.lr, run.steps) == (s.lr, s.steps) and not run.tuning and run.pattern != DENSE
        if at_shared and line[column] and int(line["step"]) > LATE * s.steps and (not only or run.method in only):
            found.setdefault((run.method, run.pattern), []).append(float(line[column]))
    names = [name for name in (*methods.METHODS, *methods.others()) if any(m == name for m, _ in found)]
    patterns = sorted({p for _, p in found}, key=sparsity)
    cells = [[f"`{name}`", *(_short(found.get((name, p), [])) for p in patterns)] for name in names]
    return table([["method", *patterns], *cells])


def _short(values: list[float]) -> str:
    mean = mean_and_error(values)[0]
    return "–" if math.isnan(mean) else f"{mean:.2g}"


def notes(cases: Cases) -> str:
    """What each name in a table stands for."""
    return table([["name", "method"], *([f"`{name}`", methods.get(name).note] for name in cases.methods())])


def table(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first line is its head.

    Example:
        >>> print(table([["a", "b"], ["1", "2"]]))
        | a | b |
        | --- | --- |
        | 1 | 2 |
    """
    head, *body = lines
    rows = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
