"""Why sparse methods are ahead of dense in short runs of ``gpt``: the loss on training text beside that on the test set, and how much of
the first mask is kept: one row per method and seed in ``short.csv``.

The rows are runs of the matrix done again, at the rates that are best there.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from nmkernels import ops

from ..tables import table
from . import studies, tables
from .methods import SRSTE
from .rows import RESULTS, append_lines, load, load_lines, stamp
from .spec import DENSE, RunSpec
from .stats import estimate
from .tables import Tables
from .worker import Training

PATH = RESULTS / "short.csv"
TASK, PATTERN = "gpt", "2:4"
METHODS = (DENSE, "ste", SRSTE, "sste", "slope")
AT = (50, 250, 1000)
"""Steps after which masks are compared with those of the first step."""
KEPT = tuple(f"kept_{step}" for step in AT)
COLUMNS = ("method", "lr", "seed", "train_loss", "val_loss", *KEPT, "machine", "versions", "commit", "date")


def measure(path: Path = PATH) -> None:
    """Append the runs that have no row."""
    done = {(row["method"], row["seed"]) for row in load_lines(path)}
    known = Tables(load())
    for name in METHODS:
        for seed, row in known.best(studies.case(TASK, name, PATTERN)).items():
            if (row.method, str(seed)) not in done:
                append_lines([run(RunSpec(row.case, row.lr, seed))], COLUMNS, path)


def run(spec: RunSpec) -> dict[str, Any]:
    """The row of one run."""
    it, kept = Training(spec), dict.fromkeys(KEPT, math.nan)
    first: list[Tensor] = []
    for step in range(1, spec.case.steps + 1):
        it.step(step)
        if spec.case.method.startswith(("ste", "srste")) and (step == 1 or step in AT):
            masks = [ops.mask(layer.weight.detach(), PATTERN).bool() for layer in it.handle.layers.values()]
            first = first or masks
            if step in AT:
                same = sum(int((a & b).sum()) for a, b in zip(first, masks, strict=True))
                kept[f"kept_{step}"] = round(same / sum(int(a.sum()) for a in first), 4)
    test, task = it.evaluate(), it.task
    text = task.corpus  # type: ignore[attr-defined]
    try:
        task.corpus = replace(text, val=text.train)  # type: ignore[attr-defined]
        train = it.evaluate()
    finally:
        task.corpus = text  # type: ignore[attr-defined]
    losses = {"train_loss": round(train["val_loss"], 6), "val_loss": round(test["val_loss"], 6)}
    return {"method": spec.case.method, "lr": spec.lr, "seed": spec.seed, **losses, **kept, **stamp()}


def text(path: Path = PATH) -> str:
    """The table of the page; "" without rows."""
    rows = load_lines(path)
    lines = [["method", "rate", "loss on training text", "loss on the test set", *(f"first mask kept after {step}" for step in AT)]]
    for name in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == name]
        losses = [estimate(float(row[key]) for row in mine).shown() for key in ("train_loss", "val_loss")]
        shares = [estimate(float(row[key]) for row in mine) for key in KEPT]
        shown = [f"{100 * e.mean:.0f} %" if e.n else tables.NONE for e in shares]
        lines.append([Tables([]).name(name), mine[0]["lr"], *losses, *shown])
    return table(lines) if rows else ""
