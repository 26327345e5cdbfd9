"""The clock: calls in turns, hopeless ones given up, other buffers every time. Time itself is made up here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nmkernels.autograd.choice import clock
from nmkernels.autograd.choice.clock import seconds

CPU = torch.device("cpu")


class Time:
    """A clock that only calls move on."""

    def __init__(self) -> None:
        self.now, self.log = 0.0, []

    def call(self, name: str, *takes: float) -> Callable[[], object]:
        """A call that takes these seconds in turn, the last for good."""
        left = list(takes)

        def run() -> None:
            self.log.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(clock.time, "perf_counter", lambda: made.now)
    return made


def test_calls_take_turns(time: Time) -> None:
    found = seconds({"a": [time.call("a", 0.2)], "b": [time.call("b", 0.3)]}, CPU, 2.0)
    assert found == {"a": pytest.approx(0.2), "b": pytest.approx(0.3)}
    # one warms up, then they alternate
    assert time.log[:8] == ["a", "b"] * 4


def test_what_else_runs_on_a_cpu_does_not_count(time: Time) -> None:
    found = seconds({"a": [time.call("a", 1.0, *[9.0, 8.0, 0.2] * 20)], "b": [time.call("b", 0.3)]}, CPU, 60.0)
    assert found == {"a": pytest.approx(0.2), "b": pytest.approx(0.3)}
    assert time.log.count("a") > 1 + clock.FEWEST_ROUNDS  # nor does it make a call hopeless
    # but a lucky turn does not either, among many
    found = seconds({"a": [time.call("a", 1.0, 0.2, *[0.4] * 50)], "b": [time.call("b", 0.3)]}, CPU, 60.0)
    assert found["a"] == pytest.approx(0.4) and found["b"] == pytest.approx(0.3)


def test_short_calls_settle_first_and_the_fastest_of_some_counts(time: Time) -> None:
    # a turn of a: one long call settles, of the next two the faster counts, and two more settle
    turns = [1e-3, *[9e-3, 5e-4, 4e-4, 3e-4, 6e-4] * 40]
    found = seconds({"a": [time.call("a", *turns)], "b": [time.call("b", 7e-4)]}, CPU, 0.1)
    assert found == {"a": pytest.approx(4e-4), "b": pytest.approx(7e-4)}
    assert time.log[2:].count("b") % (6 + 2) == 0


def test_the_hopeless_are_given_up(time: Time) -> None:
    found = seconds({"a": [time.call("a", 0.1)], "b": [time.call("b", 0.25)], "c": [time.call("c", 0.19)]}, CPU, 10.0)
    assert {name: round(t, 3) for name, t in found.items()} == {"a": 0.1, "b": 0.25, "c": 0.19}
    assert time.log.count("b") == 1 + clock.FEWEST_ROUNDS and time.log.count("c") == time.log.count("a") == 1 + clock.MOST_ROUNDS


def test_the_budget_ends_it_but_not_before_the_fewest_rounds(time: Time) -> None:
    seconds({"a": [time.call("a", 1.0)], "b": [time.call("b", 1.0)]}, CPU, 0.5)
    assert time.log.count("a") == 1 + clock.FEWEST_ROUNDS
    time.log.clear()
    seconds({"a": [time.call("a", 1.0)], "b": [time.call("b", 1.0)]}, CPU, 20.0)
    assert 8 <= time.log.count("a") <= 12


def test_nothing_to_compare_is_timed_briefly(time: Time) -> None:
    assert seconds({"a": [time.call("a", 0.5)]}, CPU, 10.0) == {"a": pytest.approx(0.5)}
    assert len(time.log) == 1 + clock.FEWEST_ROUNDS
    assert seconds({}, CPU, 10.0) == {}


def test_every_call_has_other_buffers(time: Time) -> None:
    seconds({"a": [time.call(str(i), 0.1) for i in range(3)], "b": [time.call("b", 0.1)]}, CPU, 5.0)
    assert [name for name in time.log if name != "b"][:7] == ["0", "1", "2", "0", "1", "2", "0"]


def test_a_gpu_is_timed_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    at: list[float] = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = at[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Any) -> float:
            return 1e3 * float(other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls: list[float] = []

    def call(takes: float) -> Callable[[], object]:
        def run() -> None:
            calls.append(takes)
            at[0] += takes

        return run

    found = seconds({"a": [call(1e-5)], "b": [call(1e-3)]}, torch.device("cuda"), 0.0)
    assert found == {"a": pytest.approx(1e-5), "b": pytest.approx(1e-3)}
    assert calls.count(1e-5) == 1 + 5 * clock.FEWEST_ROUNDS and calls.count(1e-3) == 1 + clock.FEWEST_ROUNDS
