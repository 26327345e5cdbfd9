"""``runs.csv``: one tidy row per finished run. Several processes may add rows at once."""

from __future__ import annotations

import csv
import datetime
import fcntl
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

import torch

from .. import rows as machine_rows
from .spec import Case, RunSpec

RESULTS = machine_rows.RESULTS / "accuracy"
RUNS = "runs.csv"
AGAIN = "again.csv"
"""File of runs that were done again, on this machine or another; one row per run and machine."""


@dataclass(frozen=True)
class RunRow:
    """The result of one run.

    ``val_loss`` (nats), ``accuracy`` (percent) and ``bleu`` are of the deployable weights on the test set, for tuning seeds on validation
    data; ``int8`` and ``int4`` are losses with integers as weights. They are ``nan`` if the task has no such value. ``switch_step`` is
    STEP's T₀, 0 if there is none, and ``switch_reason`` what ended the dense phase: AutoSwitch's ``test``, its bounds ``t_min`` or
    ``t_max``, or ``fixed``. ``status`` is ``ok``, or ``diverged`` if a loss or weight was not finite (then losses are ``nan`` and ``done``
    is the number of steps until then). ``training_flops`` are those of the run, ``inference_flops`` those of one token. ``seconds`` are the
    process's CPU time; on a GPU they are elapsed time. ``data`` is a digest; ``machine`` ends with the CPU's instruction set.
    """

    task: str
    pattern: str
    method: str
    optimizer: str
    beta2: float
    lr: float
    steps: int
    seed: int
    val_loss: float
    accuracy: float
    bleu: float
    int8: float
    int4: float
    switch_step: int
    switch_reason: str
    status: str
    done: int
    seconds: float
    training_flops: float
    inference_flops: float
    data: str
    machine: str
    versions: str
    commit: str
    date: str

    @property
    def case(self) -> Case:
        """The case of this row."""
        return Case(self.task, self.method, self.pattern, self.steps, self.optimizer, self.beta2)

    @property
    def key(self) -> str:
        """The key of its run."""
        return RunSpec(self.case, self.lr, self.seed).key


COLUMNS = tuple(f.name for f in fields(RunRow))
LATER = ("int8", "int4")
"""Columns that files of earlier versions do not have."""


@cache
def stamp() -> dict[str, str]:
    """Machine, versions, commit and date; computed once per process."""
    machine = f"{machine_rows.machine()}, {torch.backends.cpu.get_cpu_capability().lower()}"
    date = datetime.date.today().isoformat()
    return {"machine": machine, "versions": machine_rows.versions(), "commit": machine_rows.commit(), "date": date}


def load(folder: Path = RESULTS, name: str = RUNS) -> list[RunRow]:
    """All rows of a results folder, the last one of each run; empty if there is no file."""
    rows = machine_rows.typed(RunRow, (dict.fromkeys(LATER, "nan") | line for line in load_lines(folder / name)))
    return list({(row.key, row.machine if name == AGAIN else ""): row for row in rows}.values())


def save(rows: Iterable[RunRow], folder: Path = RESULTS, name: str = RUNS) -> None:
    """Write the rows sorted, so that a diff shows what is new."""
    machine_rows.save([asdict(row) for row in sorted(rows, key=_order)], COLUMNS, folder / name)


def append(rows: Iterable[RunRow], folder: Path = RESULTS, name: str = RUNS) -> None:
    """Append rows to the file; for ``load`` they replace earlier rows of the same runs."""
    if (folder / name).exists() and not (folder / name).read_bytes().startswith(",".join(COLUMNS).encode()):
        tidy(folder, name)  # of an earlier version
    append_lines([asdict(row) for row in rows], COLUMNS, folder / name)


def tidy(folder: Path = RESULTS, name: str = RUNS) -> None:
    """Sort the rows and drop those that were replaced."""
    if (folder / name).exists():
        with locked(folder):
            save(load(folder, name), folder, name)


def load_lines(path: Path) -> list[dict[str, str]]:
    """The lines of a CSV as text, without an incomplete last one; empty if there is no file."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))


def append_lines(lines: Iterable[Mapping[str, object]], columns: Sequence[str], path: Path) -> None:
    """Append lines to a CSV that other processes append to as well; first drops a last line that a kill has truncated."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    with locked(path.parent):
        if not path.exists():
            machine_rows.save([], columns, path)
        writer.writerows(lines)
        with path.open("r+b") as file:
            file.truncate(whole := file.read().rfind(b"\n") + 1)
            file.seek(whole)
            file.write(text.getvalue().encode())


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder: other processes that want to write to it wait."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _order(row: RunRow) -> tuple[object, ...]:
    n, _, m = row.pattern.partition(":")
    sparsity = int(m) / int(n) if m else 0.0
    return row.task, row.method, sparsity, row.pattern, row.optimizer, row.beta2, row.steps, row.lr, row.seed, row.machine
