"""What a task is: a model, its batches as a function of (seed, step), and how it is evaluated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, TypeVar

from torch import Tensor, nn

from ..spec import unknown


@dataclass(frozen=True)
class Settings:
    """The hyper-parameters that all methods of a task share.

    The learning rate rises over ``warmup`` (a share of the steps), then falls along a cosine to ``floor`` of its peak. AdamW; weight
    decay on matrices only; the gradient's norm is clipped. β₂ is 0.99 because short runs cannot fill the window of 1/(1−β₂) steps that
    Adam's usual 0.999 averages over. These are the settings of ``python -m nmkernels train``.

    Args:
        steps: optimizer steps of a run.
        lr: the shared peak, the best of ``lrs`` for dense training on the tuning seeds.
        lrs: the peaks among which each method's own is chosen.
        scouted: the wider range from which ``lrs`` was fixed.
    """

    steps: int
    lr: float
    lrs: tuple[float, ...]
    scouted: tuple[float, ...]
    warmup: float = 0.05
    floor: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    clip: float = 1.0


class Task(ABC):
    """Base of every task; made once per process."""

    name: ClassVar[str] = ""
    settings: ClassVar[Settings]
    tokens: ClassVar[int]
    """Tokens of one batch, for the count of FLOPs."""

    shares: ClassVar[dict[str, float]] = {}
    """Layers that not every token passes once, and how often it does; see ``nm.flops``."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A fresh model from torch's generator, which the caller has seeded."""

    @abstractmethod
    def batch(self, seed: int, step: int) -> tuple[Tensor, ...]:
        """The training batch of one step; a function of (seed, step) alone, so that every method sees the same ones."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """The mean training loss of a batch, in nats."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """``val_loss`` in nats on data that training never saw, and ``accuracy`` in percent where there is one."""

    def data(self) -> str:
        """A digest of the data: rows of different data must not be compared."""
        return ""


_tasks: dict[str, type[Task]] = {}
T = TypeVar("T", bound=type[Task])


def task(name: str) -> Callable[[T], T]:
    """Register the decorated class under ``name``."""

    def register(cls: T) -> T:
        cls.name = name
        _tasks[name] = cls
        return cls

    return register


def names() -> list[str]:
    """Names of all tasks, sorted."""
    return sorted(_tasks)


@cache
def get(name: str) -> Task:
    """The task of that name, with its data loaded.

    Raises:
        ValueError: there is none; the nearest name is suggested.
    """
    if name not in _tasks:
        raise ValueError(unknown("task", name, _tasks))
    return _tasks[name]()


def settings(name: str) -> Settings:
    """The settings of the task of that name, without loading its data.

    Raises:
        ValueError: there is none.
    """
    if name not in _tasks:
        raise ValueError(unknown("task", name, _tasks))
    return _tasks[name].settings
