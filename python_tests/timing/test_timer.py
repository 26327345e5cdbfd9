"""The timer: calls alternate, very slow ones are dropped, buffers rotate. The clock is fake."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product

import pytest
import torch

from nmkernels.timing import Timer, cold, timer
from nmkernels.timing.timer import DeviceMeter, HostMeter, Task, take_turns
from python_tests.for_each import for_each

CPU = torch.device("cpu")


class Simulated:
    """A host and a device with a queue between them, in seconds of their own; ``now`` is the host's time, which only calls move on."""

    def __init__(self) -> None:
        self.now = self.busy_until = 0.0
        self.slept: list[float] = []
        self.log: list[str] = []

    def call(self, name: str, *takes: float) -> Callable[[], object]:
        """A call of the host that takes these seconds in turn, the last for good."""
        left = list(takes)

        def run() -> None:
            self.log.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run

    def queued(self, host: float, device: float, waits: bool = False) -> Callable[[], object]:
        """A call that takes the host so long to queue, and the device to run."""

        def run() -> None:
            self.now += host
            self.busy_until = max(self.busy_until, self.now) + device
            if waits:
                self.now = self.busy_until

        return run

    def synchronize(self, device: object = None) -> None:
        self.now = max(self.now, self.busy_until)

    def sleep(self, cycles: int) -> None:
        seconds = cycles / timer.CYCLES_PER_SECOND
        self.slept.append(seconds)
        self.busy_until = max(self.busy_until, self.now) + seconds


class Event:
    """Of the simulated device."""

    clock: Simulated

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.clock.now += 1e-6
        self.clock.busy_until = self.at = max(self.clock.busy_until, self.clock.now)

    def query(self) -> bool:
        return self.at <= self.clock.now

    def synchronize(self) -> None:
        self.clock.now = max(self.clock.now, self.at)

    def elapsed_time(self, end: Event) -> float:
        assert end.at <= self.clock.now
        return 1e3 * (end.at - self.at)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Simulated:
    simulated = Event.clock = Simulated()
    monkeypatch.setattr(timer.time, "perf_counter", lambda: simulated.now)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", simulated.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", simulated.sleep)
    return simulated


def compare(budget: float, **calls: Callable[[], object]) -> dict[str, float]:
    found, failed = Timer(CPU).compare({name: [call] for name, call in calls.items()}, budget)
    assert not failed
    return found


# ---- on a CPU


def test_calls_alternate_until_the_budget_ends(clock: Simulated) -> None:
    found = compare(2.0, a=clock.call("a", 0.2), b=clock.call("b", 0.3))
    assert found == {"a": pytest.approx(0.2), "b": pytest.approx(0.3)}
    assert clock.log[:8] == ["a", "b"] * 4  # one warms up, then they alternate
    for budget, least, most in ((0.5, 1 + timer.LEAST, 1 + timer.LEAST), (20.0, 8, 12)):
        clock.log.clear()
        compare(budget, a=clock.call("a", 1.0), b=clock.call("b", 1.0))
        assert least <= clock.log.count("a") <= most
    # alone there is nothing to compare
    clock.log.clear()
    assert compare(10.0, a=clock.call("a", 0.5)) == {"a": pytest.approx(0.5)} and len(clock.log) == 1 + timer.LEAST
    assert compare(10.0) == {}


def test_what_else_runs_on_a_cpu_does_not_count(clock: Simulated) -> None:
    found = compare(60.0, a=clock.call("a", 1.0, *[9.0, 8.0, 0.2] * 20), b=clock.call("b", 0.3))
    assert found == {"a": pytest.approx(0.2), "b": pytest.approx(0.3)}
    assert clock.log.count("a") > 1 + timer.LEAST  # nor does it make a call hopeless
    # but a lucky turn does not either, among many
    assert compare(60.0, a=clock.call("a", 1.0, 0.2, *[0.4] * 50), b=clock.call("b", 0.3))["a"] == pytest.approx(0.4)


def test_of_a_turn_of_short_calls_the_median_counts(clock: Simulated) -> None:
    # two warm up, then turns of four
    turns = [1e-3, 5e-4, *[9e-3, 5e-4, 4e-4, 3e-4] * 40]
    found = compare(0.1, a=clock.call("a", *turns), b=clock.call("b", 7e-4))
    assert found == {"a": pytest.approx(4.5e-4), "b": pytest.approx(7e-4)}
    assert (clock.log.count("b") - 2) % 2 == 0


def test_before_each_call_comes_another_that_does_not_count(clock: Simulated) -> None:
    meter = HostMeter([clock.call("a", 8e-4)], clock.call("torch", 5e-3))
    assert [meter.warm(), meter.turn()] == pytest.approx([8e-4, 8e-4])
    assert clock.log == ["torch", "a"] * 4


def test_of_long_calls_there_are_fewer_rounds(clock: Simulated) -> None:
    found = compare(0.02, a=clock.call("a", 0.1), b=clock.call("b", 0.15), c=clock.call("c", 9.0))
    assert found == {"a": pytest.approx(0.1), "b": pytest.approx(0.15), "c": pytest.approx(9.0)}
    assert clock.log == ["a", "b", "c", "a", "b"], "c has no chance"


def test_the_hopeless_are_given_up(clock: Simulated) -> None:
    found = compare(10.0, a=clock.call("a", 0.1), b=clock.call("b", 0.25), c=clock.call("c", 0.19))
    assert {name: round(t, 3) for name, t in found.items()} == {"a": 0.1, "b": 0.25, "c": 0.19}
    assert clock.log.count("b") == 1 + timer.LEAST and clock.log.count("c") == clock.log.count("a") == 1 + timer.MOST


def test_every_call_has_other_buffers(clock: Simulated) -> None:
    calls = {"a": [clock.call(str(i), 0.1) for i in range(3)], "b": [clock.call("b", 0.1)]}
    Timer(CPU).compare(calls, 5.0)
    assert [name for name in clock.log if name != "b"][:7] == ["0", "1", "2", "0", "1", "2", "0"]


def test_of_different_things_the_slow_sit_rounds_out(clock: Simulated) -> None:
    found = Timer(CPU).turns({"a": [clock.call("a", 0.1)], "b": [clock.call("b", 0.4)]}, 4.0, least=4)
    assert len(found.of("a")) == 20 and 4 <= len(found.of("b")) <= 6 and not found.failed
    assert clock.log.index("b", 2) < 6 and clock.log[-10:].count("b") >= 1  # evenly spread


def test_one_that_fails_costs_no_other(clock: Simulated) -> None:
    left = {"later": 2, "first": 0}

    def fails(name: str) -> None:
        left[name] -= 1
        if left[name] < 0:
            raise RuntimeError(name)

    calls = {"a": [clock.call("a", 0.1)], "later": [lambda: fails("later")], "first": [lambda: fails("first")]}
    found, failed = Timer(CPU).compare(calls, 0.1)
    assert found == {"a": pytest.approx(0.1)} and failed == {"later": "RuntimeError: later", "first": "RuntimeError: first"}


def test_calls_that_report_their_own_seconds(clock: Simulated) -> None:
    tasks: list[Task] = []

    def seconds(task: Task) -> float:
        tasks.append(task)
        return float(len(tasks))

    calls = {"a": [clock.call("a0", 0.1), clock.call("a1", 0.1)], "b": [clock.call("b0", 0.1)]}
    found = Timer(CPU, seconds).turns(calls, 1.0)
    assert found.rounds == [{"a": 1.0, "b": 2.0}] and not found.failed and not clock.log
    for task in tasks:
        task()
    assert [task.name for task in tasks] == ["a", "b"] and clock.log == ["a0", "b0"], "the first set of buffers"
    assert Timer(CPU, seconds).compare(calls, 1.0) == ({"a": 3.0, "b": 4.0}, {})


def test_operands_exceed_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "COLD_BYTES", 1000)
    w, x = torch.randn(10, 10), torch.randn(5, 10)
    first, *others = cold((x, {"dense": w, "rows": "cannot"}, None))
    assert first[0] is x and len(others) == 1
    ((x2, forms, seed),) = others
    assert torch.equal(x, x2) and x2 is not x and torch.equal(forms["dense"], w) and forms["rows"] == "cannot" and seed is None
    assert len(cold(torch.zeros(1))) == timer.MOST_SETS and len(cold(torch.zeros(250))) == 1


# ---- on a GPU


@for_each("host, runs", product([1e-6, 20e-6, 300e-6, 5e-3], [3e-6, 50e-6, 1e-3, 30e-3]))
def test_device_time_is_independent_of_the_host(clock: Simulated, host: float, runs: float) -> None:
    now = [host]
    meter = DeviceMeter([lambda: clock.queued(now[0], runs)()], "cuda")
    meter.warm()
    assert meter.turn() == pytest.approx(runs, rel=0.01)
    assert 1 <= meter.count <= timer.MOST_ON_DEVICE and meter.count * host <= max(host, timer.DEVICE_BATCH)
    if host == 1e-6 and runs > 1e-5:  # a host that becomes slower is noticed
        now[0] = 60e-6
        assert meter.turn() == pytest.approx(runs, rel=0.01)


def test_the_first_call_does_not_count(clock: Simulated) -> None:
    calls = iter([clock.queued(2.0, 50e-6)])
    meter = DeviceMeter([lambda: next(calls, clock.queued(1e-6, 50e-6))()], "cuda")
    assert meter.warm() == pytest.approx(50e-6, rel=0.01) and meter.count == 4


def test_calls_that_wait_for_the_device_end(clock: Simulated) -> None:
    meter = DeviceMeter([clock.queued(10e-6, 50e-6, waits=True)], "cuda")
    meter.warm()
    assert meter.turn() == pytest.approx(60e-6, rel=0.05)
    assert max(clock.slept) <= timer.LONGEST_SLEEP
    # and are not tried again and again
    before = len(clock.slept)
    meter.turn()
    assert len(clock.slept) == before + 1


def test_a_batch_follows_calls_of_its_own(clock: Simulated) -> None:
    order: list[str] = []
    meters = {n: DeviceMeter([lambda n=n: (order.append(n), clock.queued(1e-6, 9e-5)())], "cuda") for n in "ab"}
    take_turns(meters, 0.0, least=1)
    assert [meter.count for meter in meters.values()] == [2, 2] and order[-8:] == ["a"] * 4 + ["b"] * 4


def test_a_gpu_is_timed_by_its_events(monkeypatch: pytest.MonkeyPatch, clock: Simulated) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    found, _ = Timer(torch.device("cuda")).compare({"a": [clock.queued(1e-5, 1e-5)], "b": [clock.queued(1e-5, 1e-3)]}, 0.0)
    assert found == {"a": pytest.approx(1e-5, rel=0.1), "b": pytest.approx(1e-3, rel=0.1)}
