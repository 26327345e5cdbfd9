"""How long calls take: in turns, so that a machine that slows down slows all of them; medians; every turn on other buffers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Call = Callable[[], object]

MOST_ROUNDS, FEWEST_ROUNDS = 31, 3
HOPELESS = 2.0
"""A call that is so many times slower than the fastest after the fewest rounds is timed no longer."""

SHORTEST = 50e-6
"""Seconds of one reading on a GPU: shorter calls are timed several at once, since its clock is coarse."""


def seconds(calls: Mapping[str, Sequence[Call]], device: torch.device, budget: float) -> dict[str, float]:
    """The median time of each call, by name.

    Args:
        calls: the same call on several sets of buffers, so that a weight comes from memory as it does in a model.
        device: whose clock counts: events on a GPU, else the processor's.
        budget: seconds for all of them together, unless the fewest rounds take longer.
    """
    read = _on_gpu if device.type == "cuda" else _on_cpu
    end = time.perf_counter() + budget
    times: dict[str, list[float]] = {name: [] for name in calls}
    counts = {name: 1 if device.type != "cuda" else _count(read(ways, 0, 1)) for name, ways in calls.items()}
    left = list(calls)
    for turn in range(MOST_ROUNDS):
        if turn >= FEWEST_ROUNDS:
            best = min(statistics.median(times[name]) for name in left)
            left = [name for name in left if statistics.median(times[name]) <= HOPELESS * best]
            if len(left) < 2 or time.perf_counter() > end:
                break
        for name in left:
            times[name].append(read(calls[name], turn, counts[name]))
    return {name: statistics.median(found) for name, found in times.items()}


def _count(once: float) -> int:
    return max(1, min(64, round(SHORTEST / max(once, 1e-7))))


def _on_cpu(ways: Sequence[Call], turn: int, count: int) -> float:
    way = ways[turn % len(ways)]
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def _on_gpu(ways: Sequence[Call], turn: int, count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for i in range(count):
        ways[(turn + i) % len(ways)]()
    end.record()
    end.synchronize()
    return 1e-3 * float(start.elapsed_time(end)) / count
