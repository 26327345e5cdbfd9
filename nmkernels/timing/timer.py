"""Time calls in alternating rounds, so that a slow moment affects all of them, each call on other buffers than the one before.

On a CPU a torch operation runs before each call, as in a model, so the cost of waking threads and refilling caches is included; a turn is
the median of a few such calls. On a GPU a turn is a batch of calls between two events, after an untimed batch. The device sleeps while a
batch is queued; if it starts before the batch is fully queued, the batch is timed again after a longer sleep.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

Call = Callable[[], object]
Under = Callable[[], AbstractContextManager[object]]
"""A context manager around calls, not timed."""

HOST_BATCH, MOST_IN_BATCH = 2e-3, 5
"""Seconds and largest number of calls per turn, on a CPU."""
LONG = 6e-2
"""A call that takes longer (seconds) is warmed up only once."""
BETWEEN = 1 << 17
"""Elements of the operation between two calls, enough for torch to use up to four threads."""

DEVICE_BATCH, MOST_ON_DEVICE = 2e-4, 50
"""Seconds per batch, on the device and for queueing, and largest number of calls; CUDA's queue holds 1024 kernels."""
TRIES = 4
"""Attempts to time a batch if the device was faster than the host; always the case for calls that wait for the device."""
LONGEST_SLEEP = 0.05
CYCLES_PER_SECOND = 2e9
"""Roughly the fastest clock; a slower device sleeps longer, which does no harm."""

LEAST, MOST = 3, 31
"""Fewest and most rounds per call."""
SLOW, LEAST_SLOW = 0.5, 5
"""Calls that take longer (seconds), such as training steps, need only that many rounds."""

HOPELESS, FAR = 2.0, 4.0
"""A call that many times slower than the fastest is dropped from a comparison: after the fewest rounds, or during warm-up."""
STRETCH = 15
"""The fewest rounds may take that many times the budget; longer calls get fewer rounds."""

COLD_BYTES, MOST_SETS = 64 << 20, 16
"""Total bytes of all buffer sets, more than the caches, because in a model other layers run in between; and most sets."""


@dataclass(frozen=True)
class Task:
    """A named call to time."""

    name: str
    run: Call

    def __call__(self) -> object:
        return self.run()


Seconds = Callable[[Task], float]
"""A replacement for the device's clock: returns the seconds of one call."""


class Meter(Protocol):
    """Times one call."""

    cost: float
    """Approximate seconds per turn."""

    def warm(self) -> float:
        """Run untimed calls and calibrate; return the seconds of one call."""

    def turn(self) -> float:
        """Time the call once more; return its seconds."""


class HostMeter:
    """Times single calls with the host's clock, each after an untimed ``between``: the median of a few calls."""

    def __init__(self, calls: Sequence[Call], between: Call) -> None:
        self.calls, self.between, self.count, self.cost = cycle(calls), between, 1, 0.0

    def warm(self) -> float:
        took = self.turn()
        if took < LONG:
            took = self.turn()
            self.count = max(1, min(MOST_IN_BATCH, int(HOST_BATCH / max(took, 1e-9))))
        self.cost = self.count * took
        return took

    def turn(self) -> float:
        samples = []
        for _ in range(self.count):
            self.between()
            call, start = next(self.calls), time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
        return median(samples)


class DeviceMeter:
    """Times batches of calls on the current stream of a CUDA device with events."""

    def __init__(self, calls: Sequence[Call], device: Any, batch: float = DEVICE_BATCH, under: Under = nullcontext) -> None:
        self.next, self.device, self.batch, self.under = cycle(calls).__next__, device, batch, under
        self.count, self.ahead, self.tries, self.cost = 1, 0.0, TRIES, 0.0

    def warm(self) -> float:
        # the first call compiles and allocates, the second measures the queueing time, a batch the running time
        with self.under():
            self.next()()
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            self.next()()
            queued = time.perf_counter() - start
            torch.cuda.synchronize(self.device)
            seconds = time.perf_counter() - start
        self._size(seconds, queued)
        took = self.turn()
        self._size(took, queued)
        self.cost = self.ahead + 2 * self.count * took
        return took

    def _size(self, took: float, queued: float) -> None:
        """Choose batch size and sleep from a call's seconds on the device and its seconds to queue."""
        self.count = max(1, min(MOST_ON_DEVICE, int(self.batch / max(took, 1e-9)), int(self.batch / max(queued, 1e-9))))
        self.ahead = min(LONGEST_SLEEP, max(self.ahead, 1.5 * (2 * self.count + 1) * queued))

    def turn(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(self.tries):
            with self.under():
                torch.cuda.synchronize(self.device)
                torch.cuda._sleep(int(self.ahead * CYCLES_PER_SECOND))
                self._batch()
                start.record()
                self._batch()
                end.record()
                late = start.query()
            end.synchronize()
            took = float(start.elapsed_time(end)) / 1e3 / self.count
            if not late:
                return took
            self.ahead = min(LONGEST_SLEEP, 4 * self.ahead + 1e-5)
        self.tries = 1  # the call synchronises by itself, so host time is its true cost
        return took

    def _batch(self) -> None:
        for _ in range(self.count):
            self.next()()


@dataclass(frozen=True)
class Turns:
    """Seconds of each call in the rounds that it took part in, and the errors of failed calls."""

    rounds: list[dict[str, float]]
    failed: dict[str, str] = field(default_factory=dict)

    def of(self, name: str) -> list[float]:
        """All samples of one call."""
        return [r[name] for r in self.rounds if name in r]


def take_turns(meters: Mapping[str, Meter], seconds: float, least: int = LEAST, most: int = MOST, hopeless: float = 0.0) -> Turns:
    """Time calls in alternating rounds for about ``seconds``, after a warm-up.

    Each call gets an equal share of the time; a slow one skips rounds, evenly spread, but takes part in at least ``least``. A call that
    raises is dropped. With ``hopeless``, where only the fastest matters, all take part in every round until they are that many times slower
    than the fastest; it ends when the time is up or only one is left, and runs fewer than ``least`` rounds if these would take ``STRETCH``
    times as long.
    """
    wanted: dict[str, int] = {}
    fastest: dict[str, float] = {}
    failed: dict[str, str] = {}
    rounds: list[dict[str, float]] = []

    def guarded(name: str, step: Call) -> float:
        try:
            return float(step())  # type: ignore[arg-type]
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
            return float("nan")

    end = time.perf_counter() + seconds
    collecting = gc.isenabled()
    gc.disable()
    try:
        warm: dict[str, float] = {}
        for name, meter in meters.items():
            took = warm[name] = guarded(name, meter.warm)
            share = most if hopeless else min(most, int(seconds / len(meters) / max(meter.cost, 1e-9)))
            wanted[name] = max(min(least, LEAST_SLOW) if took > SLOW else least, share)
        left = [name for name in meters if name not in failed]
        if hopeless and left:
            best = min(warm[name] for name in left)
            for name in [name for name in left if warm[name] > FAR * best]:
                rounds.append({name: warm[name]})
                left.remove(name)
            least = max(1, min(least, int(STRETCH * seconds / max(sum(meters[name].cost for name in left), 1e-9))))
        total = max((wanted[name] for name in left), default=0)
        for i in range(total):
            if hopeless and i >= least:
                best = min((fastest[name] for name in left), default=0.0)
                left = [name for name in left if fastest[name] <= hopeless * best]
                if len(left) < 2 or time.perf_counter() > end:
                    break
            turn = [name for name in left if i % (total // wanted[name]) == 0]
            turns = {name: guarded(name, meters[name].turn) for name in turn}
            rounds.append({name: took for name, took in turns.items() if name not in failed})
            left = [name for name in left if name not in failed]
            fastest |= {name: min(took, fastest.get(name, took)) for name, took in rounds[-1].items()}
    finally:
        if collecting:
            gc.enable()
    return Turns(rounds, failed)


class Timer:
    """Times calls on a device, with events on a GPU and the host's clock otherwise, or with ``clock``."""

    def __init__(self, device: torch.device, clock: Seconds | None = None) -> None:
        self.device, self.clock = device, clock

    def turns(self, calls: Mapping[str, Sequence[Call]], seconds: float, *, least: int = LEAST, hopeless: float = 0.0) -> Turns:
        """Time calls in alternating rounds, each on several sets of buffers, for about ``seconds``; see ``take_turns``."""
        if self.clock is not None:
            return Turns([{name: self.clock(Task(name, some[0])) for name, some in calls.items()}])
        cuda = self.device.type == "cuda"
        with torch.cuda.device(self.device) if cuda else nullcontext():  # events belong to the current device
            other = torch.zeros(0 if cuda else BETWEEN, dtype=torch.float32)
            between = partial(other.mul_, 1.0)
            meters = {name: DeviceMeter(some, self.device) if cuda else HostMeter(some, between) for name, some in calls.items()}
            return take_turns(meters, seconds, least, hopeless=hopeless)

    def compare(self, calls: Mapping[str, Sequence[Call]], seconds: float) -> tuple[dict[str, float], dict[str, str]]:
        """Compare calls to find the fastest: seconds of each, and the errors of those that failed.

        On a CPU the lower quartile of the turns, because other processes can only slow a call down (up to 40 times if they take a core from
        threads that wait for each other); on a GPU the median. A call dropped during warm-up has its warm-up time.
        """
        turns = self.turns(calls, seconds, hopeless=HOPELESS)
        samples = {name: sorted(turns.of(name)) for name in calls if name not in turns.failed}
        return {name: some[len(some) // 4] if self.device.type == "cpu" else median(some) for name, some in samples.items()}, turns.failed


def cold(operands: Any) -> list[Any]:
    """Return the operands (tensors in tuples and dicts) and enough copies of them to exceed the caches."""
    held = sum(leaf.nbytes for leaf in tree_leaves(operands) if isinstance(leaf, Tensor))
    sets = min(MOST_SETS, -(-COLD_BYTES // max(held, 1)))
    return [operands, *(tree_map_only(Tensor, Tensor.clone, operands) for _ in range(sets - 1))]
