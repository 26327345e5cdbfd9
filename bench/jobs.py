"""Runs processes in parallel, each in its own group and with a time limit; what an earlier call finished is not repeated.

A job runs items (tests, or cases to time) and records the result of each (``bench.outcomes``). If its process crashes, hangs or loses its
device, the current item fails and another process continues with the rest. At the deadline all processes are ended, and the next call
continues with what is left. A job without items counts as one item.
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import outcomes
from .outcomes import Outcome

ROOT = Path(__file__).resolve().parents[1]
LIVES = 6
"""How often a job's process is started; otherwise a kernel that always crashes would need a new process for each of its tests."""

START = 60.0
"""The least time limit, in seconds, before a process's first item, between items and after its last."""

LINES, WIDTH = 6, 200
"""How many failures of a job are shown, and how many characters of each."""

OWN_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}


@dataclass
class Job:
    """One process, and its successors if it dies; its results are read from its file.

    Args:
        name: shown, and used for its files.
        words: the command, run in the repository's root.
        limit: the most seconds of an item, or of a job without items, after which the process is ended.
        alone: nothing else runs at the same time.
        env: more environment variables.
        fine: exit statuses that mean success.
        refused: a regular expression; if a line of the output matches, the job failed, whatever its exit status.
        folder: of its files.
    """

    name: str
    words: tuple[str, ...] = ()
    limit: float = math.inf
    alone: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    fine: tuple[int, ...] = (0,)
    refused: str = ""
    folder: Path = Path()
    seconds: float = 0.0
    lives: int = LIVES

    @property
    def file(self) -> Path:
        """The file of its outcomes."""
        return self.folder / f"{re.sub('[^A-Za-z0-9_]+', '-', self.name).strip('-')}.jsonl"

    @property
    def output(self) -> str:
        """What its processes wrote."""
        log = self.file.with_suffix(".log")
        return log.read_text(encoding="utf-8", errors="replace").strip() if log.exists() else ""

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """The results of the items that have ended."""
        return outcomes.read(self.file)[0]

    @property
    def left(self) -> bool:
        """Whether some of it is left for another call."""
        return not any(line.get("finished") for line in outcomes.lines(self.file))

    def count(self, what: str) -> int:
        """Number of items that passed, failed or were skipped."""
        return sum(outcome.what == what for outcome in self.outcomes.values())

    def reasons(self) -> list[str]:
        """A line for each failure, with the first line of its error."""
        return [f"{o.item.partition('::')[2] or o.item}: {o.why}" for o in self.outcomes.values() if o.what == "failed"]

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {what}" for what in ("passed", "failed", "skipped") if (n := self.count(what)))
        verdict = "FAILED" if self.count("failed") else "left" if self.left else "ok"
        return f"{verdict:<7}{self.seconds:>6.0f} s  {self.name}: {counts}"

    # ---- its process

    def start(self) -> None:
        """Start a process that continues with the items that have not ended."""
        self.before, self.started, self.lives = self.outcomes, time.time(), self.lives - 1
        outcomes.tell(self.file, starts=True)
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **self.env, outcomes.ENV: str(self.file)}
        with self.file.with_suffix(".log").open("ab") as log:
            self.process = subprocess.Popen(
                self.words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, **OWN_GROUP
            )

    def kill(self) -> None:
        """Kill the process and its group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.seconds += time.time() - self.started

    def over(self) -> bool:
        """Whether the job has ended; a process that died is replaced by another one."""
        status, (ended, item), why = self.process.poll(), outcomes.read(self.file), ""
        if status is None:
            waited = time.time() - max(self.started, self.file.stat().st_mtime)
            if waited <= (self.limit if item else max(self.limit, START)):
                return False
            why = f"took more than {self.limit:g} s and was ended"
        elif status < 0:
            why = f"its process was ended by {signal.Signals(-status).name}"
        elif item:
            why = f"its process ended during it, with exit status {status}"
        self.kill()  # also processes that it left behind
        lost = outcomes.lost(self.file)  # whatever the exit status, which may be that of a wrapping tool
        if why and not lost:
            outcomes.end(self.file, Outcome(item or self.name, "failed", why))
        if not (why or lost):
            self._judge(status or 0)
        elif item or len(ended) > len(self.before):  # it did not die before its first item, or after its last
            if self.lives:
                self.start()
                return False
            outcomes.end(self.file, Outcome(self.name, "failed", f"given up after {LIVES} processes; the rest was not run"))
        outcomes.tell(self.file, finished=True)
        return True

    def _judge(self, status: int) -> None:
        """Record the result of a process that ended by itself, as far as its items do not tell it."""
        ended, text = self.outcomes, self.output
        new = [outcome for item, outcome in ended.items() if item not in self.before]
        if self.refused and (line := re.search(self.refused, text, re.M)):
            outcomes.end(self.file, Outcome(self.name, "failed", line[0]))
        elif status not in self.fine and not any(outcome.what == "failed" for outcome in new):
            outcomes.end(self.file, Outcome(self.name, "failed", f"exit status {status}: {first_error(text)}"))
        elif not ended:
            outcomes.end(self.file, Outcome(self.name, "passed"))


def run(jobs: Sequence[Job], deadline: float = math.inf, workers: int = 1, say: Callable[[str], None] = print) -> None:
    """Run the jobs that no earlier call finished until the deadline, ``workers`` at a time, those that must be alone last."""
    waiting = sorted((job for job in jobs if job.left), key=lambda job: job.alone)
    if len(waiting) < len(jobs):
        say(f"{len(jobs) - len(waiting)} of {len(jobs)} were finished by an earlier call")
    running: list[Job] = []
    try:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < workers and not (running and (waiting[0].alone or running[0].alone)):
                running.append(waiting.pop(0))
                running[-1].start()
            for job in [job for job in running if job.over()]:
                running.remove(job)
                say("\n".join([str(job), *shown(job.reasons())]))
            time.sleep(0.05)
    finally:  # no process is left behind, even if this one is ending
        for job in running:
            job.kill()


def shown(reasons: Sequence[str]) -> list[str]:
    """The first reasons, cut to ``WIDTH`` characters, and how many more there are."""
    more = [f"    and {len(reasons) - LINES} more"] if len(reasons) > LINES else []
    return [*(f"    {reason}"[:WIDTH] for reason in reasons[:LINES]), *more]


def first_error(text: str) -> str:
    """The most useful line of a failed process's output: a compiler's first error, otherwise the last line."""
    found = [line.strip() for line in text.splitlines() if line.strip()] or ["no output"]
    return next((line for line in found if re.search(r"(^|[\s:])error:|CMake Error|ninja: error", line)), found[-1])
