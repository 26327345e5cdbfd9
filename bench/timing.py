"""Interleaved timing: providers take turns, so that a machine that changes its speed changes it for all.

A turn is calls that do not count for ``SETTLE`` seconds, then the one that does: each provider is timed as if it were called again and
again. Without them the clock shows what the provider before left behind: torch's OpenMP threads spin for about 3 ms after each of its
calls, holding cores that the threads of another pool need, and its weights fill the cache. What a call costs straight after another
provider's is a figure of its own (``Work.alternating``), and it is told beside the first.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .registry import Call, Provider, Ratio

SETTLE = 6e-3
"""Seconds of calls before the one that counts; a call of a tenth of a second needs none, others then make no difference."""

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


def take_turns(providers: Sequence[Provider], device: str, seconds: float, least: int = LEAST, settle: float = SETTLE) -> Timed:
    """Time the calls in turn for about ``seconds``, after two of each that do not count (one of a slow one).

    In each turn calls that do not count go first, for ``settle`` seconds; none of a call that takes sixteen times as long.
    Each provider has an equal share of the time; one too slow for its share sits rounds out, ``least`` excepted, evenly spread.
    """
    clock = on_cuda if device.startswith("cuda") else on_cpu
    share = seconds / len(providers)
    wanted, settles = {}, {}
    with no_garbage_collection():
        for p in providers:
            took = _once(p, clock)
            took = took if took > SLOW else _once(p, clock)
            settles[p.name] = settle if took < 16 * settle else 0.0
            turn = took + (max(took, settle) if settles[p.name] else 0.0)
            wanted[p.name] = max(min(least, LEAST_SLOW) if took > SLOW else least, min(MOST, int(share / max(turn, 1e-9))))
            for samples in p.parts.values():
                samples.clear()
        total = max(wanted.values())
        rounds: list[dict[str, float]] = []
        for i in range(total):
            rounds.append({p.name: _turn(p, clock, settles[p.name]) for p in providers if i % (total // wanted[p.name]) == 0})
    return Timed(rounds)


def _turn(p: Provider, clock: Clock, settle: float) -> float:
    counted = {part: len(samples) for part, samples in p.parts.items()}
    start = time.perf_counter()
    with p.under():
        while time.perf_counter() - start < settle:
            p.call()
        for part, samples in p.parts.items():
            del samples[counted[part] :]
        return clock(p.call)


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
