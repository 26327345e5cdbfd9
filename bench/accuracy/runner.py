"""Many runs: a pool of processes of one thread each, progress, and nothing lost when it stops."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

from . import rows, traces
from .spec import RunSpec
from .worker import Outcome, attempt, settle_process

Say = Callable[[str], None]


def say(text: str) -> None:
    """A plain line of progress."""
    print(time.strftime("%H:%M:%S", time.gmtime()), text, file=sys.stderr, flush=True)


def run_all(specs: Iterable[RunSpec], folder: Path, workers: int = 2, tell: Say = say, pool: Executor | None = None) -> list[Outcome]:
    """Do every run and keep each row as soon as it is there; the failed ones come back, and are tried again by the next call.

    Interrupting loses only what is under way. At most two runs per worker are handed out ahead, so an interrupt is quick.

    Args:
        pool: what runs them, for tests; by default ``workers`` processes with low priority.
    """
    queue, failed, total = list(specs)[::-1], [], 0
    todo = len(queue)
    rows.stamp()  # the commit as the tree is now, not as it may have become when the first row is written
    own = pool is None
    pool = pool or ProcessPoolExecutor(workers, mp_context=get_context("fork"), initializer=settle_process)
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
                _keep(outcome, folder)
                if outcome.row is None:
                    failed.append(outcome)
                pace = (time.perf_counter() - begin) / total
                tell(f"[{total}/{todo}, {pace * (todo - total) / 60:.0f} min left] {_line(outcome)}")
    except BrokenProcessPool:
        tell("a worker process died (out of memory?). Finished rows are kept; run the same command again to go on.")
        raise
    finally:
        if own:
            pool.shutdown(wait=False, cancel_futures=True)
    return failed


def _keep(outcome: Outcome, folder: Path) -> None:
    if outcome.trace:
        traces.append(outcome.trace, folder, outcome.spec.task)
    if outcome.row is not None:
        rows.append(outcome.row, folder)  # last, because the row is what says that the run is done


def _line(outcome: Outcome) -> str:
    row = outcome.row
    if row is None:
        return f"{outcome.spec.key} FAILED: {outcome.error}"
    accuracy = f" {row.accuracy:.2f} %" if row.accuracy == row.accuracy else ""
    return f"{outcome.spec.key} {row.purpose}: {row.status} {row.val_loss:.4f}{accuracy} in {row.seconds:.0f} s"
