"""``runs.csv``: one tidy row per finished run."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .. import rows as machine_rows
from .spec import RunSpec

RESULTS = machine_rows.RESULTS / "accuracy"
RUNS = "runs.csv"


@dataclass(frozen=True)
class RunRow:
    """What one run came to.

    ``val_loss`` and ``accuracy`` are of the deployable weights, ``train_loss`` the mean of the last 50 steps, in nats; ``switch_step`` is
    STEP's T₀, 0 where there is none. ``status`` is ``ok``, or ``diverged`` where a loss or weight was not finite (losses are then
    ``nan`` and ``done`` says after how many steps). ``training_flops`` are those of the run,
    ``inference_flops`` those of one token; 0 where they have not been counted yet.
    """

    task: str
    pattern: str
    method: str
    purpose: str
    seed: int
    lr: float
    steps: int
    val_loss: float
    accuracy: float
    train_loss: float
    switch_step: int
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
        return RunSpec(self.task, self.method, self.pattern, self.seed, self.lr, self.steps, self.purpose)


def stamp() -> dict[str, str]:
    """Where and when: machine, versions, commit, date."""
    date = datetime.date.today().isoformat()
    return {"machine": machine_rows.machine(), "versions": machine_rows.versions(), "commit": machine_rows.commit(), "date": date}


def load(folder: Path = RESULTS) -> list[RunRow]:
    """All rows of a results folder; none where there is no file. Of a run that stands there twice, the last."""
    kinds = {"int": int, "float": float, "str": str}
    lines = machine_rows.load(folder / RUNS)
    rows = [RunRow(**{f.name: kinds[str(f.type)](line.get(f.name, 0)) for f in fields(RunRow)}) for line in lines]
    return list({row.spec.key: row for row in rows}.values())


def save(rows: Iterable[RunRow], folder: Path = RESULTS) -> None:
    """Write the rows sorted, so that a commit shows what is new."""
    machine_rows.save([asdict(row) for row in sorted(rows, key=_order)], [f.name for f in fields(RunRow)], folder / RUNS)


def append(row: RunRow, folder: Path = RESULTS) -> None:
    """Add one row; it replaces a row of the same run."""
    save([*(r for r in load(folder) if r.spec.key != row.spec.key), row], folder)


def _order(row: RunRow) -> tuple[object, ...]:
    n, _, m = row.pattern.partition(":")
    sparsity = int(m) / int(n) if m else 0.0
    return row.task, row.method, sparsity, row.pattern, row.steps, row.lr, row.seed
