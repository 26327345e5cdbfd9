"""How long calls take: in turns, so that a machine that slows down slows all of them, and each call on other buffers than the one before.

On a CPU an operation of torch comes before each call, as in a model: so waking threads counts, and what the operation left in the caches.
A turn is a few such calls, of which the median counts. On a GPU it is a batch of calls between two events of the device, after as many
that do not count. The device sleeps while a batch is queued, and a batch whose start was reached before its end was queued is timed again
after a longer sleep.
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
"""What is entered around calls, outside the clock."""

HOST_BATCH, MOST_IN_BATCH = 2e-3, 5
"""Seconds and calls of a turn, on a CPU."""
LONG = 6e-2
"""A call of more seconds is warmed up once."""
BETWEEN = 1 << 17
"""Numbers of the operation between two calls: torch gives each of up to four threads a part."""

DEVICE_BATCH, MOST_ON_DEVICE = 2e-4, 50
"""Seconds of the device, and of the host that queues it, that a batch takes, about; CUDA's queue holds 1024 kernels."""
TRIES = 4
"""So often a batch is timed when the device was faster than the host; calls that wait for the device always are."""
LONGEST_SLEEP = 0.05
CYCLES_PER_SECOND = 2e9
"""Of the fastest clock about; a device with a slower one sleeps longer, which changes nothing."""

LEAST, MOST = 3, 31
"""Rounds in which every call takes part at least, and at most."""
SLOW, LEAST_SLOW = 0.5, 5
"""A call of more seconds is content with so many rounds: a training step, mostly."""

HOPELESS, FAR = 2.0, 4.0
"""Of calls that are compared, one that is so many times slower than the fastest after the fewest rounds, or while warming up, is timed no
longer."""
STRETCH = 15
"""So many times the budget the fewest rounds may take; of longer calls there are fewer."""

COLD_BYTES, MOST_SETS = 64 << 20, 16
"""Sets of buffers together exceed this much cache: a model comes back to a layer when others have been there."""


@dataclass(frozen=True)
class Task:
    """A call to time, by its name."""

    name: str
    run: Call

    def __call__(self) -> object:
        return self.run()


Seconds = Callable[[Task], float]
"""What a caller gives instead of the device's clock: the seconds of one call."""


class Meter(Protocol):
    """How one call is timed."""

    cost: float
    """Seconds that a turn takes, about."""

    def warm(self) -> float:
        """Calls that do not count, from which the meter learns how to time; the seconds of one."""

    def turn(self) -> float:
        """Seconds of a call, timed once more."""


class HostMeter:
    """Times single calls by the host's clock, each after a ``between`` that does not count: the median of those that fit into ``batch``
    seconds (0: one)."""

    def __init__(self, calls: Sequence[Call], batch: float = HOST_BATCH, under: Under = nullcontext, between: Call | None = None) -> None:
        self.calls, self.batch, self.under, self.between = cycle(calls), batch, under, between
        self.count, self.cost = 1, 0.0

    def warm(self) -> float:
        with self.under():
            took = self._once()
            if took < LONG:
                took = self._once()
                self.count = max(1, min(MOST_IN_BATCH, int(self.batch / max(took, 1e-9))))
        self.cost = self.count * took
        return took

    def _once(self) -> float:
        if self.between is not None:
            self.between()
        call, start = next(self.calls), time.perf_counter()
        call()
        return time.perf_counter() - start

    def turn(self) -> float:
        with self.under():
            return median([self._once() for _ in range(self.count)])


class DeviceMeter:
    """Times batches of calls on the current stream of a CUDA device by its events."""

    def __init__(self, calls: Sequence[Call], device: Any, batch: float = DEVICE_BATCH, under: Under = nullcontext) -> None:
        self.next, self.device, self.batch, self.under = cycle(calls).__next__, device, batch, under
        self.count, self.ahead, self.tries, self.cost = 1, 0.0, TRIES, 0.0

    def warm(self) -> float:
        # compile and allocate in a first call, learn from a second how long it takes to queue, from a batch how long it runs
        with self.under():
            self.next()()
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            self.next()()
            queued = time.perf_counter() - start
            torch.cuda.synchronize(self.device)
            whole = time.perf_counter() - start
        self._size(whole, queued)
        took = self.turn()
        self._size(took, queued)
        self.cost = self.ahead + 2 * self.count * took
        return took

    def _size(self, took: float, queued: float) -> None:
        """Choose the batch and the sleep for calls that take so long on the device, and on the host to queue."""
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
        self.tries = 1  # it waits for the device by itself: its time is the host's, and that is what it costs
        return took

    def _batch(self) -> None:
        for _ in range(self.count):
            self.next()()


@dataclass(frozen=True)
class Turns:
    """Seconds of each call in each round, without those that sat it out, and why those failed that did."""

    rounds: list[dict[str, float]]
    failed: dict[str, str] = field(default_factory=dict)

    def of(self, name: str) -> list[float]:
        """The samples of one call."""
        return [r[name] for r in self.rounds if name in r]


def take_turns(meters: Mapping[str, Meter], seconds: float, least: int = LEAST, most: int = MOST, hopeless: float = 0.0) -> Turns:
    """Time calls in turn for about ``seconds``, after some of each that do not count.

    Each has an equal share of the time; one too slow for its share sits rounds out, ``least`` excepted, evenly spread. One that raises is
    left out from then on, and costs the others nothing. With ``hopeless``, where only the fastest matters, all take part in every round,
    until one so many times slower than the fastest is left out; and it ends with the time, or when nothing is left to compare. The fewest
    rounds are fewer then where they would take ``STRETCH`` times as long.
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
            found = {name: guarded(name, meters[name].turn) for name in turn}
            rounds.append({name: took for name, took in found.items() if name not in failed})
            left = [name for name in left if name not in failed]
            fastest |= {name: min(took, fastest.get(name, took)) for name, took in rounds[-1].items()}
    finally:
        if collecting:
            gc.enable()
    return Turns(rounds, failed)


class Timer:
    """Times calls on a device: by events on a GPU, else by the processor's clock; or as ``given`` says."""

    def __init__(self, device: torch.device, given: Seconds | None = None) -> None:
        self.device, self.given = device, given

    def turns(self, calls: Mapping[str, Sequence[Call]], seconds: float, *, least: int = LEAST, hopeless: float = 0.0) -> Turns:
        """Time calls in turn, each on several sets of buffers, for about ``seconds``; see ``take_turns``."""
        if self.given is not None:
            return Turns([{name: self.given(Task(name, some[0])) for name, some in calls.items()}])
        cuda = self.device.type == "cuda"
        with torch.cuda.device(self.device) if cuda else nullcontext():  # the events of a GPU are those of the current one
            other = torch.zeros(0 if cuda else BETWEEN, dtype=torch.float32)
            between = partial(other.mul_, 1.0)
            meters = {name: DeviceMeter(some, self.device) if cuda else HostMeter(some, between=between) for name, some in calls.items()}
            return take_turns(meters, seconds, least, hopeless=hopeless)

    def compare(self, calls: Mapping[str, Sequence[Call]], seconds: float) -> tuple[dict[str, float], dict[str, str]]:
        """Seconds of each call, to find the fastest, and why those failed that did.

        On a CPU the lower quartile of the turns: what else runs there can only add, up to 40 times where it takes a core from threads that
        wait for each other. On a GPU the median. One that was given up while warming up has the time of that.
        """
        found = self.turns(calls, seconds, hopeless=HOPELESS)
        samples = {name: sorted(found.of(name)) for name in calls if name not in found.failed}
        return {name: some[len(some) // 4] if self.device.type == "cpu" else median(some) for name, some in samples.items()}, found.failed


def cold(given: Any) -> list[Any]:
    """Operands, tensors in tuples and dicts, and so many copies of them that together they exceed the caches."""
    held = sum(leaf.nbytes for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
    sets = min(MOST_SETS, -(-COLD_BYTES // max(held, 1)))
    return [given, *(tree_map_only(Tensor, Tensor.clone, given) for _ in range(sets - 1))]
