"""Check and time the candidates for one problem, choose the fastest correct one and store it in the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch import Tensor

from ..pattern import NMError
from .table import TABLE
from .timer import Call, Timer

LEAST_GAIN = 1.02
"""The least speed-up for which a candidate replaces the baseline; less is noise."""

BUDGET = 0.5
"""Seconds of timing per problem."""

Check = Callable[[Callable[[Tensor], object]], str]
"""A ``Validator``, or a function that calls one."""


@dataclass(frozen=True)
class Candidate:
    """One candidate: ``run`` writes the result into its argument; ``calls`` are the timed calls, on alternating buffers.

    ``declines`` prepares the candidate and returns the reason why it cannot run, or an empty string.
    """

    name: str
    run: Callable[[Tensor], object]
    calls: Callable[[], Sequence[Call]]
    declines: Callable[[], str] = str


@dataclass
class Measurement:
    """The measurement of one problem: seconds of each correct candidate, and the reasons against the others.

    Args:
        problem: its key in the table.
        baseline: the default, replaced by a faster candidate.
        halves: the seconds in each half of the time.
        refused: candidates with a wrong result or an exception.
        declined: candidates that cannot run here.
        path: the file written to; if None, ``note`` says why.
    """

    problem: str
    baseline: str
    seconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    declined: dict[str, str] = field(default_factory=dict)
    path: str | None = None
    note: str = ""
    halves: list[dict[str, float]] = field(default_factory=list)

    def time(self, timer: Timer, calls: Mapping[str, Sequence[Call]], budget: float) -> None:
        """Time the calls in two halves of ``budget`` seconds, in alternating rounds."""
        for _ in range(2):
            took, failed = timer.compare({name: some for name, some in calls.items() if name not in self.refused}, budget / 2)
            self.halves.append(took)
            self.refused |= failed
        names = [name for name in calls if all(name in half for half in self.halves)]
        self.seconds = {name: median([half[name] for half in self.halves]) for name in names}

    def extend(self, other: Measurement) -> None:
        """Add another measurement of the same problem, with other candidates."""
        self.seconds |= other.seconds
        self.refused |= other.refused
        self.halves = [first | second for first, second in zip(self.halves, other.halves, strict=True)]

    @property
    def best(self) -> str:
        """The fastest candidate; the baseline unless another gains more than noise in both halves."""
        best = min(self.seconds, key=self.seconds.__getitem__, default=self.baseline)
        if self.baseline not in self.seconds:
            return best
        return best if all(half[self.baseline] >= LEAST_GAIN * half[best] for half in self.halves) else self.baseline

    @property
    def gain(self) -> float | None:
        """Speed-up of the best over the baseline; None if the baseline was not timed."""
        base = self.seconds.get(self.baseline)
        return None if base is None else base / self.seconds[self.best]

    def store(self, choice: Any, by: str = "nm.tune") -> None:
        """Use ``choice``, whose form the caller defines, from now on, in this process and, if the table is writable, in later ones; None
        removes an earlier one."""
        microseconds = {name: round(1e6 * t, 3) for name, t in self.seconds.items()}
        line = {"choice": choice, "us": microseconds, "refused": self.refused, "by": by}
        try:
            self.path = str(TABLE.store({self.problem: None if choice is None else line}))
        except OSError as error:
            self.note = f"could not be stored, valid in this process only: {error}"

    def __str__(self) -> str:
        text = "no candidate is correct"
        if self.seconds:
            text = f"{self.best}, {1e6 * self.seconds[self.best]:.1f} us"
            base = self.seconds.get(self.baseline)
            text += f", default {1e6 * base:.1f} us" if base is not None else ""
        return f"{self.problem}: {text}, {len(self.refused)} refused{f' ({self.note})' if self.note else ''}"


def measure(problem: str, candidates: Sequence[Candidate], validator: Check, timer: Timer, budget: float = BUDGET) -> Measurement:
    """Check every candidate, of which the first is the baseline, and time the correct ones in alternating rounds."""
    measurement = Measurement(problem, candidates[0].name)
    right = []
    for candidate in candidates:
        why = wrong = ""
        try:
            why = candidate.declines()
            wrong = "" if why else validator(candidate.run)
        except Exception as error:  # a kernel may not fit the device, or may refuse its operands
            text = str(error).partition("\n")[0]
            wrong = text if isinstance(error, NMError) else f"{type(error).__name__}: {text}"
        if why:
            measurement.declined[candidate.name] = why
        elif wrong:
            measurement.refused[candidate.name] = wrong
        else:
            right.append(candidate)
    measurement.time(timer, {c.name: c.calls() for c in right}, budget)
    return measurement
