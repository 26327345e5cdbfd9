"""The description of a run, and helpers: the mean with its error, and the error for an unknown name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

EVALUATION_SEEDS = tuple(range(10))
"""Evaluation seeds, for every reported number, of weights and data order; the task sets how many are used."""

TUNING_SEEDS = (100, 101, 102)
"""Tuning seeds, on which learning rates are chosen; a task may use fewer."""

DENSE = "dense"
"""The pattern of dense training."""

OPTIMIZERS = ("adamw", "sgd")
"""AdamW, or SGD with momentum 0.9."""


@dataclass(frozen=True)
class RunSpec:
    """The description of one run.

    Args:
        task, method: names in ``tasks`` and ``methods``.
        pattern: ``"2:4"``, or ``"dense"``.
        seed: of the initial weights, the data order and the recipe's random numbers.
        lr: peak learning rate.
        steps: optimizer steps.
        optimizer: ``"adamw"`` or ``"sgd"``.
        beta2: AdamW's β₂; always 0 for SGD.
        purpose: the stage of the plan. A label only: runs that differ in nothing else are the same run.

    Raises:
        ValueError: the optimizer is unknown.
    """

    task: str
    method: str
    pattern: str
    seed: int
    lr: float
    steps: int
    optimizer: str = "adamw"
    beta2: float = 0.999
    purpose: str = ""

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(unknown("optimizer", self.optimizer, OPTIMIZERS))
        if self.optimizer == "sgd":
            object.__setattr__(self, "beta2", 0.0)

    @property
    def key(self) -> str:
        """The key of this run: ``gpt/step/2:4/adamw/0.999/0.004/1000/0``."""
        return f"{self.task}/{self.method}/{self.pattern}/{self.optimizer}/{self.beta2:g}/{self.lr:g}/{self.steps}/{self.seed}"

    @classmethod
    def from_key(cls, key: str) -> RunSpec:
        """The run of that key.

        Example:
            >>> RunSpec.from_key("mlp/srste/1:8/sgd/0/0.1/1000/0").optimizer
            'sgd'
        """
        task, method, pattern, optimizer, beta2, lr, steps, seed = key.split("/")
        return cls(task, method, pattern, int(seed), float(lr), int(steps), optimizer, float(beta2))

    @property
    def tuning(self) -> bool:
        """Whether the run is for choosing a rate, and is evaluated on validation data if the task has some besides its test set."""
        return self.seed in TUNING_SEEDS


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error s / √n; the error of a single value is nan.

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
    """The error message for an unknown name, with the nearest name and all names.

    Example:
        >>> unknown("task", "gtp", ["gpt", "vit"])
        "unknown task 'gtp'; did you mean 'gpt'? Choose from gpt, vit."
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {kind} {name!r}; {hint}Choose from {', '.join(names)}."
