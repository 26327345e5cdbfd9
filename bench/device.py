"""Timing on a GPU, beside ``nmkernels.tuning.timer``: the host's time for queueing, CUDA graphs, and data that the cache does not hold.

Weights of less than the L2 (50 MB on an H100) come from there when they are used again: callers rotate among copies, ``rotated``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

from .registry import Provider

BATCH = 2e-3
"""Seconds that a batch takes, about, on the device and on the host that queues it: at 4 us a kernel 500 of the 1024 that a queue holds."""

CACHES = 4
"""Copies of the data make up so many times the L2: then none is left of a copy when its turn comes again."""

HOST_CALLS = 100
"""Kernels whose launches the host is timed for together: a tenth of what the queue holds, or it would wait for the device after all."""

T = TypeVar("T")


class QueueMeter:
    """Times what the host spends on calls that it does not wait for; the device is waited for before and after."""

    def __init__(self, p: Provider, device: str | None) -> None:
        self.p, self.cost, self.calls = p, 0.0, max(1, HOST_CALLS // p.count)
        self.wait: Callable[[], None] = partial(torch.cuda.synchronize, device) if device else _nothing

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
