"""How long calls take: in turns, so that a machine that slows down slows all of them; every call on other buffers.

On a CPU a turn is calls that do not count for ``SETTLE`` seconds and then some that do, of which the fastest counts: torch's OpenMP threads
spin for about 3 ms after its calls and hold cores that another pool's threads need. Of the turns the one at the lower quartile counts: what
else runs on the machine can only add, up to 40 times where it takes a core from threads that wait for each other (AMD EPYC, 2 cores,
2026-11-21), and the choice shall hold when it is gone. On a GPU a turn is a batch between two events, and the median counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle

import torch

Call = Callable[[], object]

MOST_ROUNDS, FEWEST_ROUNDS = 31, 3
HOPELESS = 2.0
"""A call that is so many times slower than the fastest after the fewest rounds is timed no longer."""

SETTLE = 4e-3
SLOW = 16 * SETTLE
"""Seconds of a call that needs no settling."""

BATCH = {"cpu": 2e-3, "cuda": 50e-6}
LEAST_IN_BATCH = {"cpu": 2, "cuda": 1}
MOST_IN_BATCH = {"cpu": 5, "cuda": 64}
"""Seconds and calls of a turn that count. A GPU's clock is coarse, and a call alone would wait for its launch."""


def seconds(calls: Mapping[str, Sequence[Call]], device: torch.device, budget: float) -> dict[str, float]:
    """What each call takes, by name.

    Args:
        calls: the same call on several sets of buffers, so that a weight comes from memory as it does in a model.
        device: whose clock counts: events on a GPU, else the processor's.
        budget: seconds for all of them together, unless the fewest rounds take longer.
    """
    gpu, end = device.type == "cuda", time.perf_counter() + budget
    ways = {name: cycle(some) for name, some in calls.items()}
    once = {name: _on_gpu(way, 1) if gpu else _on_cpu(way, 1, 0.0) for name, way in ways.items()}
    kind = "cuda" if gpu else "cpu"
    counts = {name: _count(kind, took) for name, took in once.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    typical, left = statistics.median if gpu else _lower_quartile, list(calls)
    for turn in range(MOST_ROUNDS):
        if turn >= FEWEST_ROUNDS:
            best = min((min(times[name]) for name in left), default=0.0)
            left = [name for name in left if min(times[name]) <= HOPELESS * best]
            if len(left) < 2 or time.perf_counter() > end:
                break
        for name in left:
            settle = 0.0 if once[name] > SLOW else SETTLE
            times[name].append(_on_gpu(ways[name], counts[name]) if gpu else _on_cpu(ways[name], counts[name], settle))
    return {name: typical(found) for name, found in times.items()}


def _lower_quartile(found: Sequence[float]) -> float:
    return sorted(found)[len(found) // 4]


def _count(kind: str, took: float) -> int:
    least = LEAST_IN_BATCH[kind] if took <= SLOW else 1
    return max(least, min(MOST_IN_BATCH[kind], int(BATCH[kind] / max(took, 1e-9))))


def _on_cpu(ways: Iterator[Call], count: int, settle: float) -> float:
    """Seconds of the fastest of ``count`` calls, after ``settle`` seconds of others."""
    end = time.perf_counter() + settle
    while settle and time.perf_counter() < end:
        next(ways)()
    found = []
    for _ in range(count):
        way, start = next(ways), time.perf_counter()
        way()
        found.append(time.perf_counter() - start)
    return min(found)


def _on_gpu(ways: Iterator[Call], count: int) -> float:
    """Seconds of a call, the mean of a batch."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        next(ways)()
    end.record()
    end.synchronize()
    return 1e-3 * float(start.elapsed_time(end)) / count
