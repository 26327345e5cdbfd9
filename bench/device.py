"""Timing on a GPU, in addition to ``nmkernels.timing.timer``: host time of asynchronous calls, CUDA graphs, and data outside the cache.

Weights smaller than the L2 (50 MB on an H100) would be read from there when used again, so callers rotate among copies (``rotated``).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeVar

import torch

from .registry import Call, Provider

BATCH = 2e-3
"""Approximate seconds of a batch, on the device and on the host: at 4 us a kernel, 500 of the 1024 launches that a queue holds."""

CACHES = 4
"""The copies of the data together are this many times the L2, so that a copy is evicted before it is used again."""

HOST_CALLS = 100
"""Launches that are timed together on the host: a tenth of what the queue holds, or the host would wait for the device."""

WARM = 3
"""Calls before a capture, in which memory is allocated, plans are made and kernels are compiled."""

T = TypeVar("T")


class QueueMeter:
    """Times asynchronous calls on the host; it synchronises before and after."""

    def __init__(self, p: Provider, device: str | None) -> None:
        self.p, self.cost, self.calls = p, 0.0, max(1, HOST_CALLS // p.count)
        self.wait: Callable[[], None] = partial(torch.cuda.synchronize, device) if device else lambda: None

    def warm(self) -> float:
        """Two warm-up turns."""
        self.turn()
        took = self.turn()
        self.cost = took * self.calls * self.p.count
        return took

    def turn(self) -> float:
        """Host seconds per unit of work."""
        with self.p.under():
            self.wait()
            start = time.perf_counter()
            for _ in range(self.calls):
                self.p.call()
            took = time.perf_counter() - start
            self.wait()
        return took / self.calls / self.p.count


def rotated(first: T, nbytes: float, cache: int, copy: Callable[[T], T]) -> Callable[[], T]:
    """A function that cycles through ``first`` and copies of it, ``CACHES`` times the cache in all; only ``first`` without a cache."""
    more = -(-CACHES * cache // max(1, int(nbytes))) - 1 if cache else 0
    every = [first, *(copy(first) for _ in range(more))]
    return itertools.cycle(every).__next__ if more > 0 else lambda: first


def lost(device: str) -> str:
    """Why this process can no longer use the device (mostly an illegal memory access); empty while it can."""
    if device.startswith("cuda"):
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            return str(error).splitlines()[0]
    return ""


def graphed(call: Call, device: str, pool: Callable[[], Any] | None = None) -> Call:
    """A replay of ``call`` in a CUDA graph, which the first use captures after calls on a stream of its own; on a CPU ``call`` itself.

    Graphs that share the memory that ``pool`` returns must leave nothing there that is read after another one's replay.
    """
    if not device.startswith("cuda"):
        return call

    @cache
    def replay() -> Call:
        with on_own_stream(device):
            for _ in range(WARM):
                call()
        with captured(device, pool and pool()) as graph:
            call()
        return graph.replay

    return lambda: replay()()


@contextmanager
def on_own_stream(device: str) -> Iterator[None]:
    """Inside, work is queued on a new stream, after what was queued before and before what is queued afterwards.

    Backward accumulates a gradient on the stream where its weight was first read; on the default stream that could not be captured.
    """
    stream, before = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield
    before.wait_stream(stream)


@contextmanager
def captured(device: str, pool: Any = None) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture what is called inside in a CUDA graph, with memory from ``pool`` if there is one.

    If the capture fails, torch stays on the capture's stream; the previous stream is restored for later measurements.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    before = torch.cuda.current_stream(device)
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield graph
    finally:
        torch.cuda.set_stream(before)
