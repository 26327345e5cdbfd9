"""The base class of tasks: a model, its batches as a function of (seed, step), and its evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from nmkernels.train.sparsify import FilterFn

from ..spec import find


@dataclass(frozen=True)
class Settings:
    """What all methods of a task share: hyper-parameters, seeds, and the margin within which losses count as level.

    The learning rate rises over ``warmup`` (a share of the steps), then falls to ``floor`` of its peak. AdamW, or SGD with momentum 0.9;
    weight decay on matrices only.

    Args:
        steps: optimizer steps of a run.
        lr, lr_sgd: the rates that the searches begin at, of ``plan.GRID``.
        rates: the only ones of the search, where the task is about such rates.
        decay: ``"cosine"`` or ``"linear"``.
        clip: bound on the gradient's norm, or None.
        tuning_seeds, seeds: number of tuning and of evaluation seeds.
        patterns: the ones of the page.
        margin: in nats, chosen before the runs: two methods are level if the difference of their losses is surely smaller.
        without: methods that do not fit the task.
        seconds: CPU-seconds of one core for one run of ``steps``; 0 for tasks that need a GPU.
    """

    steps: int
    lr: float
    lr_sgd: float = 0.1
    rates: tuple[float, ...] = ()
    warmup: float = 0.05
    floor: float = 0.1
    decay: str = "cosine"
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.1
    clip: float | None = 1.0
    tuning_seeds: int = 3
    seeds: int = 5
    patterns: tuple[str, ...] = ("2:4", "1:8")
    margin: float = 0.02
    without: tuple[str, ...] = ()
    seconds: float = 0.0


class Task(ABC):
    """Base class of tasks; created once per process."""

    name: ClassVar[str] = ""
    settings: ClassVar[Settings]
    tokens: ClassVar[int]
    """Tokens of one batch, for the count of FLOPs."""

    shares: ClassVar[dict[str, float]] = {}
    """How often a token passes each layer, for layers where that is not once; see ``nm.flops``."""

    most: ClassVar[int | None] = None
    """The most rows of a forward pass, if a batch does not fit into memory: gradients of equal parts are then accumulated."""

    filter_fn: FilterFn | None = None
    """The filter of layers to make sparse; by default ``nm.sparsify_`` chooses."""

    digest: str = ""
    """Of the data: rows of different data must not be compared."""

    sequences: Sequence[Tensor] = ()
    """Token ids for the calibration of one-shot pruning, in the order in which they are used, where the task is pruned so."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model, initialised from torch's generator, which the caller has seeded."""

    def batch(self, seed: int, step: int) -> tuple[Tensor, ...]:
        """The training batch of one step, on the CPU; a function of (seed, step) only, so that every method sees the same ones.

        Its tensors have one row per example, since several processes divide them.
        """
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """The mean training loss of a batch, in nats, by calling ``model``, which may be wrapped for several processes."""
        raise NotImplementedError

    @abstractmethod
    def evaluate(self, model: nn.Module, tuning: bool = False) -> dict[str, float]:
        """``val_loss`` in nats on held-out data; also ``accuracy`` in percent, ``bleu`` and ``cosine`` if the task has them.

        Args:
            tuning: evaluate on validation data, which the test set does not contain; for choosing rates.
        """

    def calibration(self, count: int) -> list[Any]:
        """The first ``count`` of ``sequences``, in batches."""
        return list(torch.stack(list(self.sequences[:count])).split(16))


def to_model(model: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors on the device of the model's parameters, for evaluation."""
    device = next(model.parameters()).device
    return tuple(t.to(device) for t in tensors)


def library(task: str, module: str, package: str = "") -> Any:
    """A library that a task needs and the package does not."""
    try:
        return import_module(module)
    except ImportError as error:
        raise RuntimeError(f"the task {task!r} needs {module}: pip install {package or module}") from error


def generator(seed: int, number: int) -> torch.Generator:
    """The random numbers of a step, epoch or pool of a seed."""
    return torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + number) & (2**63 - 1))


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
    """The task of that name, with its data loaded; ValueError if it is unknown."""
    return find("task", name, _tasks)()


def settings(name: str) -> Settings:
    """The settings of the task of that name, without loading its data; ValueError if it is unknown."""
    return find("task", name, _tasks).settings
