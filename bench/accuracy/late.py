"""Figures of the last fifth of the runs, from the traces: how many mask bits still change, how strong the decay is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from . import methods
from .spec import DENSE, EVALUATION_SEEDS
from .summary import mean_and_error
from .tables import sparsity, table
from .tasks.base import settings

SHARE = 0.8
"""The share of a run's steps after which it counts as late."""


def late(lines: Sequence[dict[str, str]], task: str, column: str, only: Sequence[str] = ()) -> str:
    """The mean of a column of the traces after ``SHARE`` of the steps at the shared rate, per method and pattern, over runs and steps."""
    s = settings(task)
    found: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        _, method, pattern, lr, steps, seed = line["run"].split("/")
        at_shared = (float(lr), int(steps)) == (s.lr, s.steps) and int(seed) in EVALUATION_SEEDS and pattern != DENSE
        if at_shared and line[column] and int(line["step"]) > SHARE * s.steps and (not only or method in only):
            found.setdefault((method, pattern), []).append(float(line[column]))
    names = [name for name in (*methods.METHODS, *methods.others()) if any(m == name for m, _ in found)]
    patterns = sorted({p for _, p in found}, key=sparsity)
    cells = [[f"`{name}`", *(_short(found.get((name, p), [])) for p in patterns)] for name in names]
    return table([["method", *patterns], *cells])


def _short(values: list[float]) -> str:
    mean = mean_and_error(values)[0]
    return "–" if math.isnan(mean) else f"{mean:.2g}"
