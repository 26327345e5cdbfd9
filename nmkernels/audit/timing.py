"""Times calls in turns, so that a machine that changes its speed changes it for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from statistics import median

import torch

SETTLE = 6e-3
"""Seconds of calls before the one that counts: torch's threads spin for some 3 ms after a call, on cores that others need."""

LEAST, MOST = 3, 31


@dataclass(frozen=True)
class Task:
    """A call to time, by its name."""

    name: str
    run: Callable[[], object]


Timer = Callable[[Task], float]


def timer_for(device: torch.device) -> Timer:
    """Seconds of one call on this device: by its own clock, or by the host's after calls that do not count."""
    return _host if device.type == "cpu" else _device


def _device(task: Task) -> float:
    """The median of calls by the device's clock, each after its cache was overwritten."""
    return 1e-3 * float(import_module("triton.testing").do_bench(task.run, warmup=5, rep=20, return_mode="median"))


def _host(task: Task) -> float:
    start = before = time.perf_counter()
    took = 0.0
    while before - start < SETTLE or not took:
        task.run()
        now = time.perf_counter()
        took, before = now - before, now
    return took


def take_turns(
    tasks: Sequence[Task], timer: Timer, seconds: float = 0.0, least: int = LEAST, of: Callable[[list[float]], float] = median
) -> dict[str, float]:
    """The median seconds of each, or what ``of`` makes of them, after one round that does not count.

    Args:
        seconds: rounds go on so long, and for ``least`` of them in any case.
    """
    end = time.perf_counter() + seconds
    for task in tasks:
        task.run()
    rounds: dict[str, list[float]] = {task.name: [] for task in tasks}
    for i in range(MOST):
        if i >= least and time.perf_counter() >= end:
            break
        for task in tasks:
            rounds[task.name].append(timer(task))
    return {name: of(found) for name, found in rounds.items()}
