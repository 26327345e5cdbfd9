"""The ways to do one thing, checked and timed: the fastest right one is chosen, and kept in the table."""

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
"""A candidate replaces the baseline only if it is so many times as fast: less is noise."""

BUDGET = 0.5
"""Seconds of timed calls for one problem."""

Check = Callable[[Callable[[Tensor], object]], str]
"""A ``Validator``, or what asks one."""


@dataclass(frozen=True)
class Candidate:
    """One way to do a problem: ``run`` writes the result into its argument, ``calls`` are timed, each on other buffers than the one before.

    ``declines`` makes it ready, and says why it takes no part, empty where it does.
    """

    name: str
    run: Callable[[Tensor], object]
    calls: Callable[[], Sequence[Call]]
    declines: Callable[[], str] = str


@dataclass
class Found:
    """What was measured of one problem: seconds of each candidate that came out right, and why the others did not take part.

    Args:
        problem: its line in the table.
        baseline: what is done where nothing is measured, which a faster one replaces.
        halves: the same by each half of the time.
        refused: wrong, or failed.
        declined: cannot do it here.
        path: the file written to, else ``note`` says why there is none.
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
        """Time the calls twice, each time for half of ``budget`` seconds, alternating."""
        for _ in range(2):
            took, failed = timer.compare({name: some for name, some in calls.items() if name not in self.refused}, budget / 2)
            self.halves.append(took)
            self.refused |= failed
        names = [name for name in calls if all(name in half for half in self.halves)]
        self.seconds = {name: median([half[name] for half in self.halves]) for name in names}

    @property
    def best(self) -> str:
        """The fastest; the baseline unless another gains more than noise in both halves."""
        best = min(self.seconds, key=self.seconds.__getitem__, default=self.baseline)
        if self.baseline not in self.seconds:
            return best
        halves = self.halves or [self.seconds]
        return best if all(half[self.baseline] >= LEAST_GAIN * half[best] for half in halves) else self.baseline

    @property
    def gain(self) -> float | None:
        """How many times as fast as the baseline the best is; None where nothing was timed."""
        base = self.seconds.get(self.baseline)
        return None if base is None else base / self.seconds[self.best]

    def line(self, choice: Any, by: str = "nm.tune") -> dict[str, Any]:
        """What the table keeps of it; ``choice`` as its owner reads it."""
        microseconds = {name: round(1e6 * t, 3) for name, t in self.seconds.items()}
        return {"choice": choice, "us": microseconds, "refused": self.refused, "by": by}

    def store(self, lines: Mapping[str, dict[str, Any] | None]) -> None:
        """Follow these lines from now on, in this process and, where the table can be written, in later ones."""
        try:
            self.path = str(TABLE.store(lines))
        except OSError as error:
            self.note = f"could not be stored, holds for this process only: {error}"

    def __str__(self) -> str:
        text = "none of its candidates is right"
        if self.seconds:
            text = f"{self.best}, {1e6 * self.seconds[self.best]:.1f} us"
            base = self.seconds.get(self.baseline)
            text += f", by default {1e6 * base:.1f} us" if base is not None else ""
        return f"{self.problem}: {text}, {len(self.refused)} refused{f' ({self.note})' if self.note else ''}"


def measure(problem: str, candidates: Sequence[Candidate], validator: Check, timer: Timer, budget: float = BUDGET) -> Found:
    """Check every candidate, the baseline being the first of them, and time those that are right, in turns."""
    found = Found(problem, candidates[0].name)
    right = []
    for candidate in candidates:
        why = wrong = ""
        try:
            why = candidate.declines()
            wrong = "" if why else validator(candidate.run)
        except Exception as error:  # a kernel that does not fit the device, or one that checks its operands
            text = str(error).partition("\n")[0]
            wrong = text if isinstance(error, NMError) else f"{type(error).__name__}: {text}"
        if why:
            found.declined[candidate.name] = why
        elif wrong:
            found.refused[candidate.name] = wrong
        else:
            right.append(candidate)
    found.time(timer, {c.name: c.calls() for c in right}, budget)
    return found
