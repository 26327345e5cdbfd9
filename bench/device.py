"""Timing on a GPU: by events of the device, over batches of calls, on data that its cache does not hold.

Three things would make such a figure wrong, and each has its guard here. A call returns before the device has begun, so the host's clock
says nothing: events do. A device that waits for the host shows the host's time, which is most of a 20 us kernel's: the device
sleeps while a whole batch is queued, and a batch whose start was reached before its end was queued is timed again with a longer sleep.
And weights of less than the L2 (50 MB on an H100) come from there when they are used again: callers rotate among copies, ``rotated``.

The batch has as many calls before it that do not count, so that what is written back to memory meanwhile is that of equal calls.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

from .registry import Call, Provider

BATCH = 2e-3
"""Seconds of the device that a batch takes, about; calls that take longer are timed one by one."""

QUEUE = 2e-3
"""Seconds of the host that a batch may take to queue: at 4 us a kernel 500 of the 1024 that CUDA's queue holds, with those before it."""

MOST_CALLS = 50
TRIES = 4
"""So often a batch is timed when the device was faster than the host; calls that wait for the device always are."""

LONGEST_SLEEP = 0.05
CYCLES_PER_SECOND = 2e9
"""Of the fastest clock about; a device with a slower one sleeps longer, which changes nothing."""

CACHES = 4
"""Copies of the data make up so many times the L2: then none is left of a copy when its turn comes again."""

HOST_CALLS = 100
"""Kernels whose launches the host is timed for together: a tenth of what the queue holds, or it would wait for the device after all."""

T = TypeVar("T")


class Clock(Protocol):
    """What a device must do to be timed; ``Cuda`` is the real one."""

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        ...

    def sleep(self, seconds: float) -> None:
        """Queue idle time."""
        ...

    def mark(self) -> Any:
        """Queue a moment in time."""
        ...

    def reached(self, mark: Any) -> bool:
        """Whether the device has come there."""
        ...

    def between(self, start: Any, end: Any) -> float:
        """Wait for ``end``; seconds of the device from ``start`` to it."""
        ...


class Cuda:
    """torch's events on the current stream of a CUDA device."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = torch.device(device)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        torch.cuda.synchronize(self.device)

    def sleep(self, seconds: float) -> None:
        """Queue idle time."""
        torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))

    def mark(self) -> Any:
        """An event, recorded."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def reached(self, mark: Any) -> bool:
        """Whether the event has happened."""
        return bool(mark.query())

    def between(self, start: Any, end: Any) -> float:
        """Seconds between two events."""
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class DeviceMeter:
    """Times batches of one provider's calls by the device's clock."""

    def __init__(self, p: Provider, clock: Clock) -> None:
        self.p, self.clock = p, clock
        self.calls, self.ahead, self.tries, self.cost = 1, 0.0, TRIES, 0.0

    def warm(self) -> float:
        """Compile and allocate in a first call, learn from a second how long it takes to queue, from a batch how long it runs."""
        with self.p.under():
            self.p.call()
            self.clock.synchronize()
            start = time.perf_counter()
            self.p.call()
            queued = time.perf_counter() - start
            self.clock.synchronize()
            whole = time.perf_counter() - start
        self._size(whole, queued)
        took = self.turn()
        self._size(took, queued)
        self.cost = self.ahead + 2 * self.calls * took
        return took

    def _size(self, took: float, queued: float) -> None:
        """Choose the batch and the sleep for calls that take so long on the device, and on the host to queue."""
        self.calls = max(1, min(MOST_CALLS, int(BATCH / max(took, 1e-9)), int(QUEUE / max(queued, 1e-9))))
        self.ahead = min(LONGEST_SLEEP, max(self.ahead, 1.5 * (2 * self.calls + 1) * queued))

    def turn(self) -> float:
        """Seconds of a call, the mean of a batch."""
        for _ in range(self.tries):
            took, late = self._batch()
            if not late:
                return took
            self.ahead = min(LONGEST_SLEEP, 4 * self.ahead + 1e-5)
        self.tries = 1  # it waits for the device by itself: its time is the host's, and that is what it costs
        return took

    def _batch(self) -> tuple[float, bool]:
        """The mean of a batch, and whether the device had to wait for the host."""
        clock, call = self.clock, self.p.call
        with self.p.under():
            clock.synchronize()
            clock.sleep(self.ahead)
            for _ in range(self.calls):
                call()
            start = clock.mark()
            for _ in range(self.calls):
                call()
            end = clock.mark()
            late = clock.reached(start)
        return clock.between(start, end) / self.calls, late


class QueueMeter:
    """Times what the host spends on calls that it does not wait for; the device is waited for before and after."""

    def __init__(self, p: Provider, device: str | None) -> None:
        self.p, self.cost, self.calls = p, 0.0, max(1, HOST_CALLS // p.count)
        self.wait: Callable[[], None] = Cuda(device).synchronize if device else _nothing

    def warm(self) -> float:
        """Two turns that do not count."""
        self.turn()
        took = self.turn()
        self.cost = took * self.calls * self.p.count
        return took

    def turn(self) -> float:
        """Seconds of the host per call and unit of it."""
        with self.p.under():
            self.wait()
            start = time.perf_counter()
            for _ in range(self.calls):
                self.p.call()
            took = time.perf_counter() - start
            self.wait()
        return took / self.calls / self.p.count


def _nothing() -> None:
    pass


def rotated(first: T, nbytes: float, cache: int, copy: Callable[[T], T]) -> Callable[[], T]:
    """``first`` and copies of it in turn, so many that with ``nbytes`` each they are ``CACHES`` times the cache; for no cache ``first``."""
    more = -(-CACHES * cache // max(1, int(nbytes))) - 1 if cache else 0
    every = [first, *(copy(first) for _ in range(more))]
    return itertools.cycle(every).__next__ if more > 0 else lambda: first


def lost(device: str) -> str:
    """Why the device can no longer be used by this process (an access outside its memory, mostly); empty while it can."""
    if device.startswith("cuda"):
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            return str(error).splitlines()[0]
    return ""


@contextmanager
def captured(device: str) -> Iterator[torch.cuda.CUDAGraph]:
    """A CUDA graph of what is called inside, to be replayed.

    Where the capture fails, torch stays on the stream of it; the stream from before is restored, for those who are measured afterwards.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    before = torch.cuda.current_stream(device)
    try:
        with torch.cuda.graph(graph):
            yield graph
    finally:
        torch.cuda.set_stream(before)


def median_seconds(call: Call, device: str, rounds: int = 7) -> float:
    """The median of single timings of a call on a CUDA device."""
    meter = DeviceMeter(Provider("", call), Cuda(device))
    meter.warm()
    return sorted(meter.turn() for _ in range(rounds))[rounds // 2]
