"""The description of a run and of a case, which is a run without its learning rate and seed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

EVALUATION_SEEDS = tuple(range(10))
"""Seeds, of weights and data order, of every reported number; a task uses the first few."""

TUNING_SEEDS = tuple(range(100, 110))
"""Seeds on which learning rates are chosen, and for which a task evaluates on its validation data; a task uses the first few."""

DENSE = "dense"
"""The method of dense training, and its pattern."""

OPTIMIZERS = ("adamw", "sgd")
"""AdamW, or SGD with momentum 0.9."""


@dataclass(frozen=True)
class Case:
    """A way to train a task.

    Args:
        task, method: names in ``tasks`` and ``methods``.
        pattern: ``"2:4"``, or ``"dense"`` for dense training.
        steps: optimizer steps.
        optimizer: ``"adamw"`` or ``"sgd"``.
        beta2: AdamW's β₂; always 0 for SGD.

    Raises:
        ValueError: the optimizer is unknown.
    """

    task: str
    method: str
    pattern: str
    steps: int
    optimizer: str = "adamw"
    beta2: float = 0.999

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(unknown("optimizer", self.optimizer, OPTIMIZERS))
        if self.optimizer == "sgd":
            object.__setattr__(self, "beta2", 0.0)
        if self.method == DENSE:
            object.__setattr__(self, "pattern", DENSE)


@dataclass(frozen=True)
class RunSpec:
    """One run: a case with a peak learning rate, and a seed of the initial weights, the data order and the recipe's random numbers."""

    case: Case
    lr: float
    seed: int

    @property
    def key(self) -> str:
        """The key of this run: ``gpt/step-10/2:4/adamw/0.999/0.003/1000/0``."""
        c = self.case
        return f"{c.task}/{c.method}/{c.pattern}/{c.optimizer}/{c.beta2:g}/{self.lr:g}/{c.steps}/{self.seed}"

    @classmethod
    def from_key(cls, key: str) -> RunSpec:
        """The run of that key.

        Raises:
            ValueError: the text is no key.
        """
        parts = key.split("/")
        if len(parts) != 8:
            raise ValueError(f"{key!r} is not the key of a run, such as gpt/ste/2:4/adamw/0.999/0.003/1000/0")
        task, method, pattern, optimizer, beta2, lr, steps, seed = parts
        return cls(Case(task, method, pattern, int(steps), optimizer, float(beta2)), float(lr), int(seed))

    @property
    def tuning(self) -> bool:
        """Whether the run is for choosing a rate, and is evaluated on validation data instead of the test set."""
        return self.seed in TUNING_SEEDS


T = TypeVar("T")


def find(kind: str, name: str, known: Mapping[str, T]) -> T:
    """The one of that name; ValueError if it is unknown, with the nearest name and all names."""
    if name not in known:
        raise ValueError(unknown(kind, name, known))
    return known[name]


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The error message for an unknown name, with the nearest name and all names."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {kind} {name!r}; {hint}Choose from {', '.join(names)}."
