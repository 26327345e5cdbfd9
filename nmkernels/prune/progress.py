"""How far a run is and how long the rest takes, over all its stages: for a function of the user's, or as a bar."""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

Tell = Callable[[int, int, str], object]
"""Called with (done, total, what) before each step of a stage, of which ``what`` begins with the name."""

BAR, LINES = 1.0, 10.0
"""Seconds after which a bar is drawn again, and a line is printed where there is none."""
BYTES = 1e9
"""Bytes per second that are assumed until some were read or written."""
TRUST = 0.5
"""An assumed rate counts as much as a measurement of so many seconds."""


class Progress:
    """The steps of a run, and its work: amounts by kind, each done at a rate that is measured meanwhile.

    Time left is Σ over kinds (planned − done) / rate. Until a kind was measured, its amounts are floating-point operations at the rate of
    one GEMM, or bytes if its name is "read" or "write".

    Args:
        tell: gets the steps; True: they are shown with the time left, by tqdm on a terminal or in a notebook, else as lines on stderr.

    ``prefix`` comes before what each step is.
    """

    def __init__(self, tell: Tell | bool | None = None, device: torch.device | None = None) -> None:
        self.shown, self.tell = tell is True, tell if callable(tell) else None
        self.what, self.device, self.prefix = "", device, ""
        self.planned: dict[str, float] = {}
        self.done: dict[str, float] = defaultdict(float)
        self.seconds: dict[str, float] = defaultdict(float)
        self._start = self._last = self._printed = time.monotonic()
        self._stage, self._flops = "", 0.0
        self._bar: Any = None
        self._end, self._lock = threading.Event(), threading.RLock()
        self._thread: threading.Thread | None = None

    def __call__(self, done: int, total: int, what: str) -> None:
        what = f"{self.prefix}{what}"
        if self.tell is not None:
            self.tell(done, total, what)
        self.what = f"{what} ({done + 1} of {total})" if total > 1 and done < total else what
        if self.shown and self._bar is None and what.partition(" ")[0] != self._stage:
            self._stage = what.partition(" ")[0]
            self._show()

    def plan(self, kind: str, amount: float) -> None:
        """There are ``amount`` of ``kind`` to do in the whole run, and not what was planned before."""
        if self.shown:
            self._rate()  # measured here, as the thread that shows the time left would share the cores with the work
        self.planned[kind] = max(amount, self.done[kind])

    def did(self, kind: str, amount: float) -> None:
        """``amount`` of ``kind`` was done since the last call."""
        now = time.monotonic()
        self.seconds[kind] += now - self._last
        self.done[kind] += amount
        self._last = now

    def left(self) -> float | None:
        """Seconds to the end; None where nothing is planned yet."""
        if not self.planned:
            return None
        total = 0.0
        for kind, amount in [*self.planned.items()]:
            rate = BYTES if kind in ("read", "write") else self._rate()
            rate = (self.done[kind] + TRUST * rate) / (self.seconds[kind] + TRUST)
            total += max(0.0, amount - self.done[kind]) / rate
        return max(0.0, total - (time.monotonic() - self._last))

    def _rate(self) -> float:
        """Floating-point operations per second of a GEMM here, measured once."""
        if not self._flops:
            size = 768
            x = torch.ones(size, size, device=self.device)
            for _ in range(2):  # the first one starts threads, or loads kernels
                begin = time.monotonic()
                float((x @ x)[0, 0])
                self._flops = 2 * size**3 / (time.monotonic() - begin + 1e-9)
        return self._flops

    # ---- what is shown

    def __enter__(self) -> Progress:
        if self.shown and self._thread is None:
            terminal = sys.stderr.isatty() or "ipykernel" in sys.modules
            if terminal:
                try:
                    from tqdm import tqdm

                    form = "{percentage:3.0f}%|{bar:24}| {desc}"
                    self._bar = tqdm(total=100, bar_format=form, file=sys.stderr, dynamic_ncols=True)
                except ImportError:
                    pass
            self._thread = threading.Thread(target=self._watch, daemon=True, name="nmkernels progress")
            self._thread.start()
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        if self._bar is not None:
            if kind is None:
                self._bar.n = 100
                self._bar.set_description_str(f"done in {_clock(time.monotonic() - self._start)}")
            self._bar.close()
        elif self.shown and kind is None:
            self.note(f"done in {_clock(time.monotonic() - self._start)}")

    def note(self, text: str) -> None:
        """Print a line on stderr, above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def _watch(self) -> None:
        """Show the time left again and again, since a step may take minutes."""
        while not self._end.wait(BAR):
            if self._bar is not None or time.monotonic() - self._printed > LINES:
                self._show()

    def _show(self) -> None:
        with self._lock:
            left = self.left()
            when = "" if left is None else f"{_clock(left)} left, "
            gone = time.monotonic() - self._start
            share = 0.0 if left is None else 100 * gone / (gone + left + 1e-9)
            if self._bar is not None:
                self._bar.n = share
                self._bar.set_description_str(f"{when}{self.what}")
            elif not self._end.is_set():
                self._printed = time.monotonic()
                self.note(f"{f'{share:.0f} %, ' if when else ''}{when}{self.what}")


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
