"""The runs, in the order of their value."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from . import methods
from .rows import RunRow, bare
from .spec import DENSE, EVALUATION_SEEDS, OPTIMIZERS, TUNING_SEEDS, RunSpec, unknown
from .tasks.base import Settings, settings

STAGES = ("tune", "tuned", "shared", "controls", "variants", "lengths", "ablation", "repeat")
"""``tune``: the search for the rate of each method, pattern and optimizer, on the tuning seeds. The others are on the evaluation seeds:
``tuned``: each method at its best rate. ``shared``: all at dense training's rate. ``controls``: comparisons for STEP. ``variants``: further
methods at the shared rate. ``lengths``: longer runs. ``ablation``: β₂ = 0.99 at the shared rate. ``repeat``: a few runs again, to see what
another machine changes; they are written to a separate file."""

BEYOND = 2
"""Rates that must have been tried on each side of the best one before it counts as the optimum."""

MOST_RATES = 9
"""The most rates of a search."""

ABLATED = 0.99
"""β₂ of the ablation."""

REPEATED = (
    *(("mlp", "dense", DENSE), ("mlp", "srste", "1:8"), ("mlp", "step", "1:8"), ("resnet", "srste", "1:8"), ("resnet", "step-25", "1:8")),
    *(("gpt", "dense", DENSE), ("gpt", "srste", "1:8"), ("vit", "step", "1:8"), ("vit", "sste", "1:8"), ("finetune", "mdgf", "1:8")),
)
"""(task, method, pattern) of the repeated runs: on the first tuning seed, at the second of the search's first rates."""


@dataclass(frozen=True)
class Search:
    """The state of the search for one learning rate.

    Args:
        rate: the best rate so far, by the mean validation loss over the tuning seeds; nan before the first rates are finished.
        below, above: how many finished rates are smaller and greater.
        losses: rate -> mean loss of finished rates, infinite if a run diverged.
        todo: the rates to run next; empty when the search is over.
    """

    rate: float
    below: int
    above: int
    losses: Mapping[float, float]
    todo: tuple[float, ...]

    @property
    def closed(self) -> bool:
        """Whether the optimum lies inside: ``BEYOND`` finished rates on either side, not all of which diverged."""
        return min(self.below, self.above) >= BEYOND and math.isfinite(self.losses[self.rate])

    @property
    def over(self) -> bool:
        """Whether nothing is left to try: the search is closed, or was given up and stays open."""
        return not self.todo


def neighbour(lr: float, factor: float, up: bool) -> float:
    """The next rate of the grid.

    Example:
        >>> neighbour(1e-3, 3, up=True), neighbour(3e-3, 3, up=True), neighbour(1e-4, 2, up=False)
        (0.003, 0.01, 5e-05)
    """
    if factor == 3:  # half decades, rounded to one digit
        return float(f"{10 ** ((round(2 * math.log10(lr)) + (1 if up else -1)) / 2):.0e}")
    return float(f"{lr * factor if up else lr / factor:.4g}")


def search(losses: Mapping[float, float], start: Sequence[float], factor: float) -> Search:
    """The state of a search, from the mean loss of each finished rate; nan and infinity mean divergence.

    It starts with the rates of ``start``. Then the grid is extended until ``BEYOND`` finished rates lie on each side of the best one, or
    ``MOST_RATES`` have been tried. Of rates with equal losses the smaller one is better.
    """
    means = {lr: loss if math.isfinite(loss) else math.inf for lr, loss in sorted(losses.items())}
    if not means:
        return Search(math.nan, 0, 0, {}, tuple(start))
    best = min(means, key=lambda lr: (means[lr], lr))
    below, above = sum(lr < best for lr in means), sum(lr > best for lr in means)
    todo = [lr for lr in start if lr not in means]
    if not todo:
        for side, up in ((below, False), (above, True)):
            end = (max if up else min)(means)
            for _ in range(BEYOND - side):
                todo.append(end := neighbour(end, factor, up))
        todo = todo[: max(0, MOST_RATES - len(means))]
    return Search(best, below, above, means, tuple(todo))


def best_rates(
    rows: Iterable[RunRow], task: str, optimizer: str = "adamw", beta2: float | None = None, length: float = 1
) -> dict[tuple[str, str], Search]:
    """(method, pattern) -> the search for its rate, for those that have a run on a tuning seed.

    Args:
        beta2: AdamW's β₂; the task's own by default.
        length: of the runs, as a multiple of the task's steps.
    """
    s = settings(task)
    wanted = RunSpec(task, "", "", 0, 0.0, _steps(s, length, tune=True), optimizer, s.betas[1] if beta2 is None else beta2)
    alike = (wanted.task, wanted.steps, wanted.optimizer, wanted.beta2)
    seeds = TUNING_SEEDS[: s.tuning_seeds]
    found: dict[tuple[str, str], dict[float, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if (row.task, row.steps, row.optimizer, row.beta2) == alike and row.seed in seeds:
            found[row.method, row.pattern][row.lr][row.seed] = row.val_loss
    return {case: search(_means(rates, len(seeds)), _start(s, optimizer), s.factor) for case, rates in found.items()}


def _means(rates: Mapping[float, Mapping[int, float]], seeds: int) -> dict[float, float]:
    return {lr: sum(losses.values()) / seeds for lr, losses in rates.items() if len(losses) == seeds}


def _start(s: Settings, optimizer: str) -> tuple[float, ...]:
    return s.start if optimizer == "adamw" else s.start_sgd


def _steps(s: Settings, length: float = 1, tune: bool = False) -> int:
    return round(length * ((s.tune_steps if tune else None) or s.steps))


def shared_rate(rows: Iterable[RunRow], task: str, optimizer: str = "adamw") -> float | None:
    """The shared rate: dense training's best. Before its search is over, the task's ``lr``, or None for SGD."""
    dense = best_rates(rows, task, optimizer).get((DENSE, DENSE))
    if dense is not None and dense.over:
        return dense.rate
    return settings(task).lr if optimizer == "adamw" else None


def threefold(lr: float, factor: float) -> float:
    """About three times the rate: the next one of a grid by 3."""
    return neighbour(lr, 3, up=True) if factor == 3 else float(f"{3 * lr:.4g}")


def plan(
    stage: str,
    task: str,
    rows: Iterable[RunRow] = (),
    only: Sequence[str] = (),
    patterns: Sequence[str] = (),
    seeds: int | None = None,
    optimizers: Sequence[str] = (),
) -> list[RunSpec]:
    """The runs of one stage as far as they are known, seed by seed, so that the finished ones are balanced at any time.

    Args:
        rows: finished runs: the search for rates depends on them, and stages that use a rate omit cases whose rate is not known yet.
        only, patterns, optimizers: methods, patterns and optimizers; by default all of the task's own.
        seeds: number of evaluation seeds; the task's own by default.

    Raises:
        ValueError: a stage, task, method or optimizer is unknown.
    """
    if stage not in STAGES:
        raise ValueError(unknown("stage", stage, STAGES))
    for name in only:
        methods.get(name)
    for name in optimizers:
        if name not in OPTIMIZERS:
            raise ValueError(unknown("optimizer", name, OPTIMIZERS))
    stages = {
        **{"tune": _tune, "tuned": _tuned, "shared": _shared, "controls": _controls, "variants": _variants},
        **{"lengths": _lengths, "ablation": _ablation, "repeat": _repeat},
    }
    it = _Choice(task, settings(task), list(rows), tuple(only), tuple(patterns), seeds, tuple(optimizers) or OPTIMIZERS)
    found = {spec.key: spec for spec in stages[stage](it)}
    return sorted(found.values(), key=lambda spec: spec.seed)


@dataclass(frozen=True)
class _Choice:
    """The arguments of ``plan``."""

    task: str
    s: Settings
    rows: list[RunRow]
    only: tuple[str, ...]
    patterns: tuple[str, ...]
    seeds: int | None
    optimizers: tuple[str, ...]

    def cases(self, usual: Sequence[str], patterns: Sequence[str], optimizer: str = "adamw") -> list[tuple[str, str]]:
        """(method, pattern), with dense training once; empty if the optimizer is not selected or not used by the task."""
        if optimizer not in self.optimizers or not _start(self.s, optimizer):
            return []
        names = [name for name in self.only or usual if optimizer == "adamw" or name in self.s.sgd_methods]
        return [(name, p) for name in names for p in ([DENSE] if name == DENSE else self.patterns or patterns)]

    def best(self, optimizer: str = "adamw", length: float = 1) -> dict[tuple[str, str], float]:
        """(method, pattern) -> its rate, for finished searches."""
        found = best_rates(self.rows, self.task, optimizer, length=length)
        return {case: search.rate for case, search in found.items() if search.over}

    def runs(
        self, stage: str, method: str, pattern: str, lr: float | None, steps: int, optimizer: str = "adamw", beta2: float | None = None
    ) -> list[RunSpec]:
        """The run on each evaluation seed; empty if there is no rate yet."""
        if lr is None:
            return []
        b = self.s.betas[1] if beta2 is None else beta2
        count = self.s.seeds if self.seeds is None else self.seeds
        return [RunSpec(self.task, method, pattern, seed, lr, steps, optimizer, b, stage) for seed in EVALUATION_SEEDS[:count]]


def _tune(it: _Choice) -> list[RunSpec]:
    s, specs = it.s, []
    lengths = [1, *(length for length in s.lengths if length != 1)] if s.length_search else [1]
    for optimizer in OPTIMIZERS:
        for length in lengths:
            usual, patterns = (s.methods, s.patterns) if length == 1 else (s.length_methods or s.methods, s.length_patterns)
            searches = best_rates(it.rows, it.task, optimizer, length=length)
            for method, pattern in it.cases(usual, patterns, optimizer):
                found = searches.get((method, pattern)) or search({}, _start(s, optimizer), s.factor)
                specs += [
                    RunSpec(it.task, method, pattern, seed, lr, _steps(s, length, tune=True), optimizer, s.betas[1], "tune")
                    for seed in TUNING_SEEDS[: s.tuning_seeds]
                    for lr in (*found.losses, *found.todo)
                ]
    return specs


def _tuned(it: _Choice) -> list[RunSpec]:
    best = {optimizer: it.best(optimizer) for optimizer in OPTIMIZERS}
    return [
        spec
        for optimizer in OPTIMIZERS
        for m, p in it.cases(it.s.methods, it.s.patterns, optimizer)
        for spec in it.runs("tuned", m, p, best[optimizer].get((m, p)), it.s.steps, optimizer)
    ]


def _shared(it: _Choice) -> list[RunSpec]:
    rates = {optimizer: shared_rate(it.rows, it.task, optimizer) for optimizer in OPTIMIZERS}
    return [
        spec
        for optimizer in OPTIMIZERS
        for m, p in it.cases(it.s.methods, it.s.patterns, optimizer)
        for spec in it.runs("shared", m, p, rates[optimizer], it.s.steps, optimizer)
    ]


def _controls(it: _Choice) -> list[RunSpec]:
    """Controls for STEP at its own rate and at the shared one: SR-STE at three times that rate, and STEP with an unfrozen second moment;
    both controls also at SR-STE's rate and at their own best rates."""
    best, shared = it.best(), shared_rate(it.rows, it.task)
    wanted: list[tuple[str, str, float | None]] = []
    for pattern in it.patterns or it.s.patterns:
        wanted.append(("srste", pattern, best.get(("srste", pattern))))
        for step in (m for m in it.s.methods if m.startswith("step") and not m.endswith("-thawed")):
            for lr in (best.get((step, pattern)), shared):
                wanted += [("srste", pattern, lr and threefold(lr, it.s.factor))]
            if (thawed := f"{step}-thawed") in methods.METHODS:
                rates = (best.get((step, pattern)), shared, best.get(("srste", pattern)), best.get((thawed, pattern)))
                wanted += [(thawed, pattern, lr) for lr in rates]
    return [
        spec
        for m, p, lr in wanted
        if "adamw" in it.optimizers and (not it.only or m in it.only)
        for spec in it.runs("controls", m, p, lr, it.s.steps)
    ]


def _variants(it: _Choice) -> list[RunSpec]:
    lr = shared_rate(it.rows, it.task)
    return [spec for m, p in it.cases(it.s.variants, it.s.patterns) for spec in it.runs("variants", m, p, lr, it.s.steps)]


def _lengths(it: _Choice) -> list[RunSpec]:
    specs = []
    for optimizer in OPTIMIZERS:
        for length in it.s.lengths:
            best = it.best(optimizer, length if it.s.length_search else 1)
            for m, p in it.cases(it.s.length_methods or it.s.methods, it.s.length_patterns, optimizer):
                specs += it.runs("lengths", m, p, best.get((m, p)), _steps(it.s, length), optimizer)
    return specs


def _ablation(it: _Choice) -> list[RunSpec]:
    lr = shared_rate(it.rows, it.task)
    return [spec for m, p in it.cases(it.s.methods, it.s.patterns) for spec in it.runs("ablation", m, p, lr, it.s.steps, beta2=ABLATED)]


def _repeat(it: _Choice) -> list[RunSpec]:
    s = it.s
    return [
        RunSpec(task, method, pattern, TUNING_SEEDS[0], s.start[1], _steps(s, tune=True), "adamw", s.betas[1], "repeat")
        for task, method, pattern in REPEATED
        if task == it.task and (not it.only or method in it.only)
    ]


def pending(specs: Iterable[RunSpec], rows: Iterable[RunRow]) -> list[RunSpec]:
    """Those of ``specs`` that have no row yet, each once."""
    done = {row.spec.key for row in rows}
    return list({spec.key: spec for spec in specs if spec.key not in done}.values())


def foreseen(rows: Iterable[RunRow], task: str, only: Sequence[str] = (), patterns: Sequence[str] = ()) -> list[RunRow]:
    """The rows, plus those that every search needs to end at its current best rate, or at its second rate if it has not begun.

    For an estimate of what is left; a search whose optimum moves needs more.
    """
    rows, start = list(rows), {optimizer: _start(settings(task), optimizer) for optimizer in OPTIMIZERS}
    begun = {(row.method, row.pattern, row.optimizer, row.steps) for row in rows if row.task == task and row.spec.tuning}
    while todo := pending(plan("tune", task, rows, only, patterns), rows):
        for spec in todo:
            fresh = (spec.method, spec.pattern, spec.optimizer, spec.steps) not in begun
            rows.append(bare(spec, abs(math.log(spec.lr / start[spec.optimizer][1])) if fresh else math.inf))
    return rows


def cost(specs: Iterable[RunSpec]) -> float:
    """CPU-hours of one core."""
    return sum(settings(spec.task).seconds * spec.steps / settings(spec.task).steps for spec in specs) / 3600
