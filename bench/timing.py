"""Times a case's providers in alternating rounds.

On a CPU a call is timed as in a model: once, directly after an elementwise torch op, when torch's threads wait for the next call and the
caches hold what the others left. The alternation, and timing on a GPU, are those of ``nmkernels.timing.timer``.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import cache

import torch

from nmkernels.timing import timer
from nmkernels.timing.timer import DeviceMeter, Meter, Turns

from . import device as gpu
from .registry import Call, Provider, Ratio

LEAST, MOST = 5, 101
"""The fewest and the most rounds of each provider."""

ACTIVATIONS = 1 << 16
"""Elements of the op between two calls: enough for all of torch's threads, few enough to leave the caches to the calls."""

QUICK = 0.05
"""Seconds; a call that takes longer needs only one warm-up call."""


class Timed(Turns):
    """Seconds of each provider in each round, and the errors of those that failed."""

    def ratio(self, ratio: Ratio, bytes_of: dict[str, float]) -> list[float]:
        """One value for each round that has all of the providers involved."""
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


def take_turns(providers: Sequence[Provider], device: str, seconds: float, least: int = LEAST) -> Timed:
    """Time the calls in alternation for about ``seconds``, after warm-up calls; see ``timing.timer.take_turns``."""
    gc.collect()
    found = timer.take_turns({p.name: meter_of(p, device) for p in providers}, seconds, least, MOST)
    return Timed(found.rounds, found.failed)


def meter_of(p: Provider, device: str) -> Meter:
    """The meter that times ``p`` on this device."""
    cuda = device.startswith("cuda")
    if p.host:
        return gpu.QueueMeter(p, device if cuda else None)
    return DeviceMeter([p.call], device, gpu.BATCH, p.under) if cuda else Alternating(p)


class Alternating:
    """Times single calls by the host's clock, each after a torch op; the parts that a call records are dropped for warm-up calls."""

    def __init__(self, p: Provider) -> None:
        self.p, self.cost = p, 0.0

    def warm(self) -> float:
        """Make one warm-up call, two of a quick one; returns the seconds of the last."""
        took = self.turn()
        if took < QUICK:
            took = self.turn()
        for samples in self.p.parts.values():
            samples.clear()
        self.cost = took + between()
        return took

    def turn(self) -> float:
        """Seconds of one call."""
        with self.p.under():
            between()
            return on_cpu(self.p.call)


def between() -> float:
    """Run an elementwise op on all of torch's threads; returns its seconds."""
    x, y = _activations()
    return on_cpu(lambda: torch.add(x, 1.0, out=y))


@cache
def _activations() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(ACTIVATIONS), torch.zeros(ACTIVATIONS)


def on_cpu(call: Call) -> float:
    """Seconds of the call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def median_seconds(call: Callable[[], object], device: str, rounds: int = 7) -> float:
    """The median of single timings of a call on a CUDA device."""
    meter = DeviceMeter([call], device, gpu.BATCH)
    meter.warm()
    return sorted(meter.turn() for _ in range(rounds))[rounds // 2]
