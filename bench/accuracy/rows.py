"""``runs.csv``: one tidy row per finished run. Several processes may add rows at once."""

from __future__ import annotations

import csv
import datetime
import fcntl
import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

import torch

from .. import rows as machine_rows
from .spec import RunSpec

RESULTS = machine_rows.RESULTS / "accuracy"
RUNS = "runs.csv"
REPEATS = "repeats.csv"
"""Some runs again, on this machine or another; of a run there is one row per machine."""


@dataclass(frozen=True)
class RunRow:
    """What one run came to.

    ``val_loss`` (nats), ``accuracy`` (percent) and ``bleu`` are of the deployable weights, ``nan`` where a task has none; on tuning seeds
    they are of validation data where the task has some apart from its test set. ``other_loss`` is that of a second test set, further
    from the training data, where the task has one. ``train_loss`` is the mean of the last 50 steps.
    ``switch_step`` is STEP's T₀, 0 where there is none, and ``switch_reason`` says what ended the dense phase: AutoSwitch's ``test``, its
    bounds ``t_min`` or ``t_max``, or ``fixed``. ``status`` is ``ok``, or ``diverged`` where a loss or weight was not finite (losses are
    then ``nan`` and ``done`` says after how many steps). ``training_flops`` are those of the run, ``inference_flops`` those of one token;
    0 where they have not been counted yet. ``seconds`` are the process's CPU time; rows of before commit c1d34ab have elapsed
    time, which is more where the machine was loaded. ``data`` is a digest; ``machine`` ends with the CPU's instruction set.
    """

    task: str
    pattern: str
    method: str
    optimizer: str
    beta2: float
    lr: float
    steps: int
    seed: int
    purpose: str
    val_loss: float
    other_loss: float
    accuracy: float
    bleu: float
    train_loss: float
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
    def spec(self) -> RunSpec:
        """The run that it is of."""
        return RunSpec(self.task, self.method, self.pattern, self.seed, self.lr, self.steps, self.optimizer, self.beta2, self.purpose)


def bare(spec: RunSpec, val_loss: float) -> RunRow:
    """A row that holds a loss and nothing else, for what only looks at losses."""
    known = {**asdict(spec), "val_loss": val_loss, "status": "ok" if math.isfinite(val_loss) else "diverged"}
    blank = {"int": 0, "float": math.nan, "str": ""}
    return RunRow(**{f.name: known.get(f.name, blank[str(f.type)]) for f in fields(RunRow)})


COLUMNS = tuple(f.name for f in fields(RunRow))


@cache
def stamp() -> dict[str, str]:
    """Where and when: machine, versions, commit, date; asked once per process."""
    machine = f"{machine_rows.machine()}, {torch.backends.cpu.get_cpu_capability().lower()}"
    date = datetime.date.today().isoformat()
    return {"machine": machine, "versions": machine_rows.versions(), "commit": machine_rows.commit(), "date": date}


def load(folder: Path = RESULTS, name: str = RUNS) -> list[RunRow]:
    """All rows of a results folder; none where there is no file. Of a run that stands there twice, the last."""
    rows = [from_text(line) for line in load_lines(folder / name)]
    return list({_identity(row, name): row for row in rows}.values())


def _identity(row: RunRow, name: str) -> tuple[str, ...]:
    return (row.spec.key, row.machine) if name == REPEATS else (row.spec.key,)


def from_text(line: Mapping[str, str]) -> RunRow:
    """The row of a line of the file."""
    kinds = {"int": int, "float": float, "str": str}
    return RunRow(**{f.name: kinds[str(f.type)](line[f.name]) for f in fields(RunRow)})


def save(rows: Iterable[RunRow], folder: Path = RESULTS, name: str = RUNS) -> None:
    """Write the rows sorted, so that a commit shows what is new."""
    machine_rows.save([asdict(row) for row in sorted(rows, key=_order)], COLUMNS, folder / name)


def append(rows: Iterable[RunRow], folder: Path = RESULTS, name: str = RUNS) -> None:
    """Add rows at the end of the file; ``load`` takes them in place of earlier rows of the same runs."""
    append_lines([asdict(row) for row in rows], COLUMNS, folder / name)


def tidy(folder: Path = RESULTS, name: str = RUNS) -> None:
    """Sort what was appended and drop the rows that were replaced."""
    if (folder / name).exists():
        with locked(folder):
            save(load(folder, name), folder, name)


def load_lines(path: Path) -> list[dict[str, str]]:
    """The lines of a CSV as text, without a last one that is not whole (yet); none where there is no file."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))


def append_lines(lines: Iterable[Mapping[str, object]], columns: Sequence[str], path: Path) -> None:
    """Add lines to a CSV that other processes add to as well; a last line that was cut off by a kill is dropped first."""
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
    """While this process alone writes to the folder; others that ask wait."""
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
