"""Which runs there are, in the order in which they are worth doing."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from . import methods
from .rows import RunRow
from .spec import DENSE, EVALUATION_SEEDS, TUNING_SEEDS, RunSpec, unknown
from .tasks.base import settings

PATTERNS = ("2:4", "1:8", "1:16")
"""Those of the main tables."""

WIDER = ("1:4", "1:32")
"""Those that complete the curves."""

LENGTHS = (0.5, 2.0)
"""Of the runs that are compared at equal training FLOPs, in a task's steps."""

STAGES = ("scout", "shared", "tune", "tuned", "variants", "wider", "others", "lengths")
"""``scout``: dense over the wider range of rates. ``shared``: the core methods at dense's best rate. ``tune``: the search for rates, with
the same number of runs for every method and pattern. ``tuned``: at the rate found. ``variants``: those that answer a question, at the
shared rate. ``wider``: the core methods at two further patterns, at the shared rate. ``others``: every other recipe at 2:4, at the
shared rate. ``lengths``: the core methods for half and twice the steps, for the comparison at equal training FLOPs."""


def plan(
    stage: str, task: str, rows: Iterable[RunRow] = (), only: Sequence[str] = (), patterns: Sequence[str] = (), seeds: int = 5
) -> list[RunSpec]:
    """The runs of one stage, seed by seed, so that whatever is done at any moment is balanced.

    Args:
        rows: what is done; ``tuned`` needs the rows of ``tune`` and leaves out what has none yet.
        only, patterns: methods and patterns, where not all are wanted.
        seeds: how many of the evaluation seeds.

    Raises:
        ValueError: a stage, task or method is unknown.
    """
    if stage not in STAGES:
        raise ValueError(unknown("stage", stage, STAGES))
    for name in only:
        methods.get(name)
    s = settings(task)
    usual = {"variants": list(methods.VARIANTS), "others": methods.others()}.get(stage, list(methods.CORE))
    cases = list(_cases(only or usual, patterns or {"wider": WIDER, "others": PATTERNS[:1]}.get(stage, PATTERNS)))
    evaluation = EVALUATION_SEEDS[:seeds]
    if stage == "scout":
        return [RunSpec(task, DENSE, DENSE, seed, lr, s.steps, stage) for seed in TUNING_SEEDS for lr in s.scouted]
    if stage == "tune":
        return [RunSpec(task, m, p, seed, lr, s.steps, stage) for seed in TUNING_SEEDS for lr in s.lrs for m, p in cases]
    if stage == "tuned":
        best = best_rates(rows, task)
        return [RunSpec(task, m, p, seed, best[m, p], s.steps, stage) for seed in evaluation for m, p in cases if (m, p) in best]
    if stage == "lengths":
        lengths = [round(s.steps * share) for share in LENGTHS]
        return [RunSpec(task, m, p, seed, s.lr, steps, "variant") for seed in evaluation for steps in lengths for m, p in cases]
    purpose = "shared" if stage == "shared" else "variant"
    return [RunSpec(task, m, p, seed, s.lr, s.steps, purpose) for seed in evaluation for m, p in cases]


def _cases(names: Iterable[str], patterns: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(method, pattern) with dense training once."""
    patterns = list(patterns)
    for name in names:
        yield from ((name, p) for p in ([DENSE] if name == DENSE else patterns))


def best_rates(rows: Iterable[RunRow], task: str) -> dict[tuple[str, str], float]:
    """(method, pattern) -> the rate of ``settings.lrs`` with the least mean validation loss over the tuning seeds.

    A rate at which a run diverged loses; a case whose search is not finished is left out.
    """
    s = settings(task)
    losses: dict[tuple[str, str, float], dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row.task == task and row.steps == s.steps and row.seed in TUNING_SEEDS and row.lr in s.lrs:
            losses[row.method, row.pattern, row.lr][row.seed] = row.val_loss if math.isfinite(row.val_loss) else math.inf
    best: dict[tuple[str, str], float] = {}
    for method, pattern in {(m, p) for m, p, _ in losses}:
        means = {lr: _mean(losses[method, pattern, lr]) for lr in s.lrs}
        if None not in means.values():
            best[method, pattern] = min(s.lrs, key=lambda lr: means[lr] or 0.0)
    return best


def _mean(by_seed: dict[int, float]) -> float | None:
    return sum(by_seed.values()) / len(by_seed) if len(by_seed) == len(TUNING_SEEDS) else None


def pending(specs: Iterable[RunSpec], rows: Iterable[RunRow]) -> list[RunSpec]:
    """Those of ``specs`` that have no row yet, each once."""
    done = {row.spec.key for row in rows}
    return list({spec.key: spec for spec in specs if spec.key not in done}.values())
