"""Does many runs in a pool of single-threaded processes, with progress; finished runs survive an interruption."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from .. import rows as machine_rows
from . import rows, traces
from .plan import pending
from .rows import REPEATS, RUNS, RunRow
from .spec import RunSpec
from .worker import Outcome, attempt, settle_process

Say = Callable[[str], None]
Plan = Callable[[list[RunRow]], list[RunSpec]]
"""A function from finished rows to the runs to do."""


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


def run_stage(wanted: Plan, folder: Path, pool: Executor, workers: int, limit: int | None = None, tell: Say = say) -> tuple[int, int]:
    """Do the missing runs, and repeat until none is left: a search adds runs once its first rates are known.

    Returns:
        how many runs were done, and how many failed. A failed run is not tried again.
    """
    done, failed = 0, set[str]()
    while limit is None or done < limit:
        found = rows.load(folder)
        todo = [spec for spec in pending(wanted(found), found) if spec.key not in failed][: None if limit is None else limit - done]
        if not todo:
            break
        failed |= {outcome.spec.key for outcome in run_all(todo, folder, pool, workers, tell)}
        done += len(todo)
    return done, len(failed)


def run_all(specs: Iterable[RunSpec], folder: Path, pool: Executor, workers: int, tell: Say = say, name: str = RUNS) -> list[Outcome]:
    """Do every run and write each row as soon as it is finished; returns the failed runs.

    An interruption loses only unfinished runs. At most two runs per worker are submitted ahead, so interrupting is quick.

    Args:
        pool: the workers, ``processes(workers)``.
        name: of the file of rows, ``runs.csv`` or ``repeats.csv``; only the first one comes with traces.
    """
    queue, failed, total = list(specs)[::-1], [], 0
    todo, tasks = len(queue), {spec.task for spec in queue}
    waiting: set[Future[Outcome]] = set()
    begin = time.perf_counter()
    try:
        while queue or waiting:
            while queue and len(waiting) < 2 * workers:
                waiting.add(pool.submit(attempt, queue.pop()))
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                outcome = future.result()
                total += 1
                _keep(outcome, folder, name)
                if outcome.row is None:
                    failed.append(outcome)
                pace = (time.perf_counter() - begin) / total
                tell(f"[{total}/{todo}, {pace * (todo - total) / 60:.0f} min left] {_line(outcome)}")
    except BrokenProcessPool:
        tell("a worker process died (out of memory?). Finished rows are kept; run the same command again to continue.")
        raise
    finally:
        for future in waiting:
            future.cancel()
        rows.tidy(folder, name)
        for task in tasks if name != REPEATS else ():
            traces.tidy(folder, task)
    return failed


def _keep(outcome: Outcome, folder: Path, name: str) -> None:
    if outcome.trace and name != REPEATS:
        traces.append(outcome.trace, folder, outcome.spec.task)
    if outcome.row is not None:
        rows.append([outcome.row], folder, name)  # last, because the row marks the run as done


def _line(outcome: Outcome) -> str:
    row = outcome.row
    if row is None:
        return f"{outcome.spec.key} FAILED: {outcome.error}"
    more = f" {row.accuracy:.2f} %" if row.accuracy == row.accuracy else ""
    more += f" BLEU {row.bleu:.1f}" if row.bleu == row.bleu else ""
    return f"{outcome.spec.key} {row.purpose}: {row.status} {row.val_loss:.4f}{more} in {row.seconds:.0f} s"
