"""One run, described in full; and what every part needs: the mean of several, and the error for an unknown name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

EVALUATION_SEEDS = (0, 1, 2, 3, 4)
"""Seeds of the weights and of the order of the data, for every figure that is reported."""

TUNING_SEEDS = (100, 101)
"""Other seeds, on which learning rates are chosen."""

DENSE = "dense"
"""What stands in the place of a pattern where nothing is sparse."""


@dataclass(frozen=True)
class RunSpec:
    """What one run trains, and why.

    Args:
        task, method: names known to ``tasks`` and ``methods``.
        pattern: ``"2:4"``, or ``"dense"``.
        seed: of the first weights, the order of the data and the recipe's draws.
        lr: peak learning rate.
        steps: optimizer steps.
        purpose: ``"scout"`` or ``"tune"`` on tuning seeds, ``"shared"``, ``"tuned"`` or ``"variant"`` on evaluation seeds. A label only:
            two runs that differ in nothing else are the same run.
    """

    task: str
    method: str
    pattern: str
    seed: int
    lr: float
    steps: int
    purpose: str = "shared"

    @property
    def key(self) -> str:
        """What tells this run from others: ``gpt/step/2:4/0.004/1000/0``."""
        return f"{self.task}/{self.method}/{self.pattern}/{self.lr:g}/{self.steps}/{self.seed}"


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error, s / √n; the error of a single value is nan.

    Example:
        >>> mean_and_error([1.0, 3.0])
        (2.0, 1.0)
    """
    n = len(values)
    if not n:
        return math.nan, math.nan
    mean = sum(values) / n
    if n == 1:
        return mean, math.nan
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The text of the error: what is unknown, what may have been meant, and what there is.

    Example:
        >>> unknown("task", "gtp", ["gpt", "vit"])
        "no task is called 'gtp'; did you mean 'gpt'? There are gpt, vit."
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"no {kind} is called {name!r}; {hint}There are {', '.join(names)}."
