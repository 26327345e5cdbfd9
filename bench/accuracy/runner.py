"""Does many runs in a pool of single-threaded processes, with progress; finished runs survive an interruption."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from .. import rows as machine_rows
from . import rows
from .place import HERE, Place
from .plan import Results, cost
from .rows import RUNS
from .spec import Case, RunSpec
from .studies import hours_left, todo
from .worker import Attempt, attempt, settle_process

Do = Callable[[RunSpec], Attempt]


def say(text: str) -> None:
    """Print a line of progress."""
    print(time.strftime("%H:%M:%S", time.gmtime()), text, file=sys.stderr, flush=True)


@contextmanager
def processes(workers: int) -> Iterator[Executor]:
    """A pool of ``workers`` single-threaded processes with low priority, each of which loads a task once. Exiting it does not wait."""
    machine_rows.commit()  # cached now, since the tree may change before the first row is written
    pool = ProcessPoolExecutor(workers, mp_context=get_context("fork"), initializer=settle_process)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def run_cases(
    cases: Sequence[Case], folder: Path, pool: Executor | None, workers: int = 1, *, seeds: int | None = None, place: Place = HERE
) -> int:
    """Do the runs that the cases need until none is left: a search asks for more once its first rates are known.

    All that is known is done at once, so that no worker waits for the last run of one search.

    Args:
        pool: ``processes(workers)``; None: in this process, as ``place`` says.
        seeds: number of evaluation seeds; the task's own by default.

    Returns:
        how many runs failed. A failed run is not tried again.
    """
    failed = set[str]()
    while True:
        found = Results(rows.load(folder))
        specs = list({spec.key: spec for case in cases for spec in todo(case, found, seeds) if spec.key not in failed}.values())
        specs = place.agree(specs)  # the first process has written the rows; others may not see them yet
        if not specs:
            return len(failed)
        left, count = hours_left(cases, found), len(specs)
        for number, outcome in enumerate(_run(specs, pool, workers, place), 1):
            if outcome.row is None:
                failed.add(outcome.spec.key)
            if place.first:
                rows.append([outcome.row] if outcome.row else [], folder)
                left -= cost(outcome.spec.case, 1)
                say(f"[run {number} of {count} now known, about {_time(max(left, 0) / workers)} left in all] {_line(outcome)}")
        if place.first:
            rows.tidy(folder)


def run_all(specs: Iterable[RunSpec], folder: Path, pool: Executor, workers: int, name: str = RUNS) -> int:
    """Do every run, and return how many failed."""
    failed = 0
    for outcome in _run(list(specs), pool, workers, HERE):
        if outcome.row is not None:
            rows.append([outcome.row], folder, name)
        failed += outcome.row is None
        say(_line(outcome))
    rows.tidy(folder, name)
    return failed


def _run(specs: list[RunSpec], pool: Executor | None, workers: int, place: Place) -> Iterator[Attempt]:
    """The outcomes, as they come. At most two runs per worker are submitted ahead, so that interrupting is quick."""
    if pool is None:
        yield from (attempt(spec, place) for spec in specs)
        return
    queue = specs[::-1]
    waiting: set[Future[Attempt]] = set()
    try:
        while queue or waiting:
            while queue and len(waiting) < 2 * workers:
                waiting.add(pool.submit(attempt, queue.pop()))
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    except BrokenProcessPool:
        say("a worker process died (out of memory?). Finished rows are kept; run the same command again to continue.")
        raise
    finally:
        for future in waiting:
            future.cancel()


def _time(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 2 else f"{max(1, round(60 * hours))} minutes"


def _line(outcome: Attempt) -> str:
    row = outcome.row
    if row is None:
        return f"{outcome.spec.key} FAILED: {outcome.error}"
    more = f" {row.accuracy:.2f} %" if row.accuracy == row.accuracy else ""
    more += f" BLEU {row.bleu:.1f}" if row.bleu == row.bleu else ""
    return f"{outcome.spec.key}: {row.status} {row.val_loss:.4f}{more} in {row.seconds:.0f} s"
