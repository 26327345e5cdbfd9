"""Interleaved timing: providers take turns, so that a machine that changes its speed changes it for all.

On a CPU a turn is calls that do not count for ``SETTLE`` seconds, then the one that does: each provider is timed as if it were called
again and again. Without them the clock shows what the provider before left behind: torch's OpenMP threads spin for about 3 ms after each
of its calls, holding cores that the threads of another pool need, and its weights fill the cache. What a call costs straight after
another provider's is a figure of its own (``Work.alternating``), and it is told beside the first. On a GPU a turn is a batch of calls,
timed by the device's own events: see ``bench.device``.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from . import device as gpu
from .registry import Call, Provider, Ratio

SETTLE = 6e-3
"""Seconds of calls before the one that counts; a call of a tenth of a second needs none, others then make no difference."""

LEAST, MOST = 7, 101
"""Rounds that every provider takes part in at least, and at most."""

SLOW, LEAST_SLOW = 0.5, 5
"""A call of more seconds than this warms up once, and is content with fewer rounds: a training step, mostly."""


class Meter(Protocol):
    """How one provider is timed."""

    cost: float
    """Seconds that a turn takes, about."""

    def warm(self) -> float:
        """Calls that do not count, from which the meter learns how to time; the seconds of one."""
        ...

    def turn(self) -> float:
        """Seconds of a call, timed once more."""
        ...


@dataclass(frozen=True)
class Timed:
    """Seconds of each provider in each round, None where it sat one out, and why those failed that did."""

    rounds: list[dict[str, float]]
    failed: dict[str, str] = field(default_factory=dict)

    def of(self, name: str) -> list[float]:
        """The samples of one provider."""
        return [r[name] for r in self.rounds if name in r]

    def ratio(self, ratio: Ratio, bytes_of: dict[str, float]) -> list[float]:
        """One figure per round in which everybody concerned took part."""
        found = []
        for r in self.rounds:
            if ratio.of not in r or any(name not in r for name in ratio.against):
                continue
            best = min(r[name] for name in ratio.against)
            if ratio.kind == "rate":
                (other,) = ratio.against
                found.append(bytes_of[ratio.of] / r[ratio.of] * r[other] / bytes_of[other])
            elif ratio.kind == "more":
                found.append(1e6 * (r[ratio.of] - best))
            else:
                found.append(best / r[ratio.of] if ratio.kind == "speed" else r[ratio.of] / best)
        return found


def take_turns(providers: Sequence[Provider], device: str, seconds: float, least: int = LEAST, settle: float = SETTLE) -> Timed:
    """Time the calls in turn for about ``seconds``, after some of each that do not count.

    Each provider has an equal share of the time; one too slow for its share sits rounds out, ``least`` excepted, evenly spread. One that
    raises is left out from then on, and costs the others nothing.
    """
    share = seconds / len(providers)
    meters: dict[str, Meter] = {}
    wanted: dict[str, int] = {}
    failed: dict[str, str] = {}

    def guarded(name: str, step: Callable[[], float]) -> float | None:
        try:
            return step()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
            return None

    with no_garbage_collection():
        for p in providers:
            meter = meter_of(p, device, settle)
            took = guarded(p.name, meter.warm)
            if took is None:
                continue
            meters[p.name] = meter
            wanted[p.name] = max(min(least, LEAST_SLOW) if took > SLOW else least, min(MOST, int(share / max(meter.cost, 1e-9))))
            for samples in p.parts.values():
                samples.clear()
        total = max(wanted.values(), default=0)
        rounds: list[dict[str, float]] = []
        for i in range(total):
            turn = [name for name in meters if name not in failed and i % (total // wanted[name]) == 0]
            found = {name: guarded(name, meters[name].turn) for name in turn}
            rounds.append({name: took for name, took in found.items() if took is not None})
    return Timed(rounds, failed)


def meter_of(p: Provider, device: str, settle: float = SETTLE) -> Meter:
    """How ``p`` is timed on this device."""
    cuda = device.startswith("cuda")
    if p.host:
        return gpu.QueueMeter(p, device if cuda else None)
    return gpu.DeviceMeter(p, gpu.Cuda(device)) if cuda else HostMeter(p, settle)


class HostMeter:
    """Times single calls by the host's clock, each after ``settle`` seconds of others; none of a call that takes sixteen times as long."""

    def __init__(self, p: Provider, settle: float) -> None:
        self.p, self.settle, self.cost = p, settle, 0.0

    def warm(self) -> float:
        """Two calls, one of a slow one."""
        took = self._once()
        took = took if took > SLOW else self._once()
        self.cost = took
        if took >= 16 * self.settle:
            self.settle = 0.0
        elif self.settle:
            self.cost += max(took, self.settle)
        return took

    def _once(self) -> float:
        with self.p.under():
            return on_cpu(self.p.call)

    def turn(self) -> float:
        """Seconds of the last call of the turn."""
        p = self.p
        counted = {part: len(samples) for part, samples in p.parts.items()}
        start = time.perf_counter()
        with p.under():
            while time.perf_counter() - start < self.settle:
                p.call()
            for part, samples in p.parts.items():
                del samples[counted[part] :]
            return on_cpu(p.call)


def on_cpu(call: Call) -> float:
    """Seconds that the call took."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


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
