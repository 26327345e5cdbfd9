"""Interleaved timing: providers take turns, so that a machine that changes its speed changes it for all.

Nothing happens between two turns, no pause and no output: torch's OpenMP threads go on spinning for milliseconds after a
call and hold the core that a thread of another pool was just woken for. After a pause of 1 ms our mask of 1024x4096 takes 3.1 ms
instead of 1.6 for that reason (2 threads, AMD EPYC, 2026-11-21; OMP_WAIT_POLICY=passive makes the difference go away).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .registry import Call, Provider, Ratio

LEAST, MOST = 7, 101
"""Rounds that every provider takes part in at least, and at most."""

SLOW, LEAST_SLOW = 0.5, 5
"""A call of more seconds than this warms up once, and is content with fewer rounds: a training step, mostly."""


Clock = Callable[[Call], float]


@dataclass(frozen=True)
class Timed:
    """Seconds of each provider in each round; None where it sat one out."""

    rounds: list[dict[str, float]]

    def of(self, name: str) -> list[float]:
        """The samples of one provider."""
        return [r[name] for r in self.rounds if name in r]

    def ratio(self, ratio: Ratio, bytes_of: dict[str, float]) -> list[float]:
        """One figure per round in which everybody concerned took part."""
        found = []
        for r in self.rounds:
            if ratio.of not in r or any(name not in r for name in ratio.against):
                continue
            if ratio.kind == "rate":
                (other,) = ratio.against
                found.append(bytes_of[ratio.of] / r[ratio.of] * r[other] / bytes_of[other])
            else:
                best = min(r[name] for name in ratio.against)
                found.append(best / r[ratio.of] if ratio.kind == "speed" else r[ratio.of] / best)
        return found


def take_turns(providers: Sequence[Provider], device: str, seconds: float, least: int = LEAST) -> Timed:
    """Time the calls in turn for about ``seconds``, after two of each that do not count (one of a slow one).

    Each provider has an equal share of the time; one too slow for its share sits rounds out, ``least`` excepted, evenly spread.
    """
    clock = on_cuda if device.startswith("cuda") else on_cpu
    share = seconds / len(providers)
    wanted = {}
    with no_garbage_collection():
        for p in providers:
            took = _once(p, clock)
            took = took if took > SLOW else _once(p, clock)
            wanted[p.name] = max(min(least, LEAST_SLOW) if took > SLOW else least, min(MOST, int(share / max(took, 1e-9))))
            for samples in p.parts.values():
                samples.clear()
        total = max(wanted.values())
        rounds: list[dict[str, float]] = []
        for i in range(total):
            rounds.append({p.name: _once(p, clock) for p in providers if i % (total // wanted[p.name]) == 0})
    return Timed(rounds)


def _once(p: Provider, clock: Clock) -> float:
    with p.under():
        return clock(p.call)


def on_cpu(call: Call) -> float:
    """Seconds that the call took."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def on_cuda(call: Call) -> float:
    """Seconds of the device that the call took, by events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect now, and not while the clock runs."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
