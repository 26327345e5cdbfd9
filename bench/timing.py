"""Interleaved timing of a case's providers by the package's own timer (``nmkernels.tuning.timer``), and the figures of each round.

On a CPU each provider is timed as if it were called again and again. What a call costs straight after another provider's is a figure of
its own (``Work.alternating``), and it is told beside the first.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

from nmkernels.tuning import timer
from nmkernels.tuning.timer import DeviceMeter, HostMeter, Meter, Turns

from . import device as gpu
from .registry import Call, Provider, Ratio

SETTLE = 6e-3
"""Seconds of calls before the one that counts."""

LEAST, MOST = 7, 101
"""Rounds that every provider takes part in at least, and at most."""


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


def take_turns(providers: Sequence[Provider], device: str, seconds: float, least: int = LEAST, settle: float = SETTLE) -> Timed:
    """Time the calls in turn for about ``seconds``, after some of each that do not count; see ``tuning.timer.take_turns``."""
    gc.collect()
    found = timer.take_turns({p.name: meter_of(p, device, settle) for p in providers}, seconds, least, MOST)
    return Timed(found.rounds, found.failed)


def meter_of(p: Provider, device: str, settle: float = SETTLE) -> Meter:
    """How ``p`` is timed on this device."""
    cuda = device.startswith("cuda")
    if p.host:
        return gpu.QueueMeter(p, device if cuda else None)
    if cuda:
        return DeviceMeter([p.call], device, gpu.BATCH, p.under)
    return _InParts(p, settle) if p.parts else HostMeter([p.call], settle, batch=0.0, under=p.under)


class _InParts(HostMeter):
    """Times calls that tell the seconds of their pieces, and keeps those of the call that counts."""

    def __init__(self, p: Provider, settle: float) -> None:
        super().__init__([p.call], settle, batch=0.0, under=p.under)
        self.parts = p.parts.values()

    def warm(self) -> float:
        took = super().warm()
        for samples in self.parts:
            samples.clear()
        return took

    def turn(self) -> float:
        counted = [len(samples) for samples in self.parts]
        took = super().turn()
        for count, samples in zip(counted, self.parts, strict=True):
            del samples[count:-1]
        return took


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
