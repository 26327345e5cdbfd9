"""Interleaved timing of a case's providers, and the figures of each round.

On a CPU a call is timed as a model makes it: once, straight after an elementwise torch op, when torch's threads wait for the next call
and the caches hold what the others left. Turns are taken, and a GPU is timed, by the package's own ``nmkernels.tuning.timer``.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import cache

import torch

from nmkernels.tuning import timer
from nmkernels.tuning.timer import DeviceMeter, Meter, Turns

from . import device as gpu
from .registry import Call, Provider, Ratio

LEAST, MOST = 5, 101
"""Rounds that every provider takes part in at least, and at most."""

ACTIVATIONS = 1 << 16
"""Elements of the op between two calls: as many as all of torch's threads share, few enough to leave the caches to the calls."""

QUICK = 0.05
"""A call that takes longer is warm after one that does not count."""


class Timed(Turns):
    """Seconds of each provider in each round, and why those failed that did."""

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


def take_turns(providers: Sequence[Provider], device: str, seconds: float, least: int = LEAST) -> Timed:
    """Time the calls in turn for about ``seconds``, after some of each that do not count; see ``tuning.timer.take_turns``."""
    gc.collect()
    found = timer.take_turns({p.name: meter_of(p, device) for p in providers}, seconds, least, MOST)
    return Timed(found.rounds, found.failed)


def meter_of(p: Provider, device: str) -> Meter:
    """How ``p`` is timed on this device."""
    cuda = device.startswith("cuda")
    if p.host:
        return gpu.QueueMeter(p, device if cuda else None)
    return DeviceMeter([p.call], device, gpu.BATCH, p.under) if cuda else Alternating(p)


class Alternating:
    """Times single calls by the host's clock, each after a torch op; pieces that a call tells the seconds of are kept if it counts."""

    def __init__(self, p: Provider) -> None:
        self.p, self.cost = p, 0.0

    def warm(self) -> float:
        """A call that does not count, two of quick ones; the seconds of the last."""
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
    """An elementwise op on activations, by all of torch's threads; the seconds that it took."""
    x, y = _activations()
    return on_cpu(lambda: torch.add(x, 1.0, out=y))


@cache
def _activations() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(ACTIVATIONS), torch.zeros(ACTIVATIONS)


def on_cpu(call: Call) -> float:
    """Seconds that the call took."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def median_seconds(call: Callable[[], object], device: str, rounds: int = 7) -> float:
    """The median of single timings of a call on a CUDA device."""
    meter = DeviceMeter([call], device, gpu.BATCH)
    meter.warm()
    return sorted(meter.turn() for _ in range(rounds))[rounds // 2]
