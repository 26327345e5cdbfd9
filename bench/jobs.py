"""Runs the processes of a step in parallel, each in its own process group and with a time limit; finished ones are not repeated.

A job runs items (tests, or cases to time) and records the result of each (``bench.outcomes``). If a process crashes, hangs or loses its
device, the current item fails and another process continues with the rest. When the step's time is up, all processes are ended, and the
next call continues with what is left. A job without items counts as one item.
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
TICK = 0.05
LIVES = 6
"""How often a job's process is started; otherwise a kernel that always crashes would need a new process for each of its tests."""

START = 60.0
"""The least time limit, in seconds, before a process's first item, between items and after its last."""

LINES, WIDTH = 6, 200
"""How many failures of a job are shown, and how many characters of each."""

OWN_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}


@dataclass(frozen=True)
class Job:
    """One process.

    Args:
        name: shown, and used for its files.
        words: the command, run in the repository's root.
        limit: the most seconds of an item, or of a job without items, after which the process is ended.
        alone: nothing else runs at the same time.
        env: more environment variables.
        fine: exit statuses that mean success.
        refused: a regular expression; if a line of the output matches, the job failed, whatever its exit status.
    """

    name: str
    words: tuple[str, ...]
    limit: float = math.inf
    alone: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    fine: tuple[int, ...] = (0,)
    refused: str = ""


@dataclass
class Ended:
    """The results of a job's items so far, whether some are left for another call, and the seconds of this one."""

    job: Job
    outcomes: dict[str, Outcome]
    left: bool
    seconds: float = 0.0

    def count(self, what: str) -> int:
        """Number of items that passed, failed or were skipped."""
        return sum(outcome.what == what for outcome in self.outcomes.values())

    def reasons(self) -> list[str]:
        """A line for each failure, with the first line of its error."""
        return [f"{o.item.partition('::')[2] or o.item}: {o.why}" for o in self.outcomes.values() if o.what == "failed"]

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {what}" for what in ("passed", "failed", "skipped") if (n := self.count(what)))
        verdict = "FAILED" if self.count("failed") else "left" if self.left else "ok"
        return f"{verdict:<7}{self.seconds:>6.0f} s  {self.job.name}{f': {counts}' if len(self.outcomes) > 1 else ''}"


class Pool:
    """Runs the jobs of one step, with their files in ``folder``, until ``deadline`` on the monotonic clock."""

    def __init__(self, folder: Path, deadline: float, say: Callable[[str], None] = print) -> None:
        self.folder, self.deadline, self.say = folder, deadline, say
        self.ended: list[Ended] = []
        self.note = ""
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, jobs: Sequence[Job], workers: int = 1, fresh: bool = False) -> list[Ended]:
        """Run the jobs that no earlier call finished (``fresh``: all), ``workers`` at a time, those that must be alone last."""
        found: dict[str, Ended] = {}
        for job in jobs:
            if fresh:
                _files(self.folder, job)[0].unlink(missing_ok=True)
            elif _finished(_files(self.folder, job)[0]):
                found[job.name] = self._result(job)
        if found:
            self.say(f"{len(found)} of {len(jobs)} were finished by an earlier call")
        waiting = sorted((job for job in jobs if job.name not in found), key=lambda job: job.alone)
        running: list[_Process] = []
        try:
            while (waiting or running) and time.monotonic() < self.deadline:
                while waiting and len(running) < workers and not (running and (waiting[0].alone or running[0].job.alone)):
                    running.append(_Process(waiting.pop(0), self.folder))
                for process in [p for p in running if p.over()]:
                    running.remove(process)
                    found[process.job.name] = ended = self._result(process.job, process.seconds)
                    self.say("\n".join([str(ended), *shown(ended.reasons())]))
                time.sleep(TICK)
        finally:  # no process is left behind, even if this one is ending
            for process in running:
                process.kill()
                found[process.job.name] = self._result(process.job, process.seconds)
            results = [found[job.name] if job.name in found else self._result(job) for job in jobs]
            self.ended += results
        return results

    def output(self, name: str) -> str:
        """The output of the job of this name."""
        path = _files(self.folder, Job(name, ()))[1]
        return path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else ""

    def _result(self, job: Job, seconds: float = 0.0) -> Ended:
        path = _files(self.folder, job)[0]
        return Ended(job, outcomes.read(path)[0], not _finished(path), seconds)


class _Process:
    """The process of a job, and its successors if it dies."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        self.path, self.log = _files(folder, job)
        self.lives, self.began = LIVES, time.monotonic()
        self._start()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def _start(self) -> None:
        self.before, _ = outcomes.read(self.path)
        outcomes.tell(self.path, starts=True)
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **self.job.env, outcomes.ENV: str(self.path)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.job.words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, **OWN_GROUP
            )
        self.started, self.lives = time.time(), self.lives - 1

    def over(self) -> bool:
        """Whether the job has ended; a process that died is replaced by another one."""
        status = self.process.poll()
        if status is None:
            if not self._hangs():
                return False
            self.kill()
            return self._died(f"took more than {self.job.limit:g} s and was ended")
        self.kill()  # processes that it left behind
        if outcomes.lost(self.path):  # whatever the exit status, which may be that of a wrapping tool
            return self._died("")
        if status < 0:
            return self._died(f"its process was ended by {signal.Signals(-status).name}")
        if outcomes.read(self.path)[1] is not None:
            return self._died(f"its process ended during it, with exit status {status}")
        return self._finish(status)

    def _hangs(self) -> bool:
        waited = time.time() - max(self.started, self.path.stat().st_mtime)
        if waited <= self.job.limit:
            return False
        return waited > START or outcomes.read(self.path)[1] is not None

    def kill(self) -> None:
        """Kill the process and its group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _died(self, why: str) -> bool:
        ended, current = outcomes.read(self.path)
        if why:
            outcomes.end(self.path, Outcome(current or self.job.name, "failed", why))
        if current is None and len(ended) == len(self.before):
            return self._close()  # before its first item, or after its last
        if not self.lives:
            outcomes.end(self.path, Outcome(self.job.name, "failed", f"given up after {LIVES} processes; the rest was not run"))
            return self._close()
        self._start()
        return False

    def _finish(self, status: int) -> bool:
        ended, _ = outcomes.read(self.path)
        new = [outcome for item, outcome in ended.items() if item not in self.before]
        text = self.log.read_text(encoding="utf-8", errors="replace")
        refused = re.search(self.job.refused, text, re.M) if self.job.refused else None
        if refused:
            outcomes.end(self.path, Outcome(self.job.name, "failed", refused[0]))
        elif status not in self.job.fine and not any(outcome.what == "failed" for outcome in new):
            outcomes.end(self.path, Outcome(self.job.name, "failed", f"exit status {status}: {first_error(text)}"))
        elif not ended:
            outcomes.end(self.path, Outcome(self.job.name, "passed"))
        return self._close()

    def _close(self) -> bool:
        outcomes.tell(self.path, finished=True)
        return True


def shown(reasons: Sequence[str], lines: float = LINES) -> list[str]:
    """The first reasons, cut to ``WIDTH`` characters, and how many more there are."""
    some = reasons[: int(min(lines, len(reasons)))]
    more = len(reasons) - len(some)
    return [*(f"    {reason}"[:WIDTH] for reason in some), *([f"    and {more} more"] if more else [])]


def first_error(text: str) -> str:
    """The most useful line of a failed process's output: a compiler's first error, otherwise the last line."""
    found = [line.strip() for line in text.splitlines() if line.strip()] or ["no output"]
    return next((line for line in found if re.search(r"(^|[\s:])error:|CMake Error|ninja: error", line)), found[-1])


def _files(folder: Path, job: Job) -> tuple[Path, Path]:
    """The files of a job's outcomes and of its output."""
    name = re.sub(r"[^A-Za-z0-9_]+", "-", job.name).strip("-")
    return folder / f"{name}.jsonl", folder / f"{name}.log"


def _finished(path: Path) -> bool:
    return any(line.get("finished") for line in outcomes.lines(path))
