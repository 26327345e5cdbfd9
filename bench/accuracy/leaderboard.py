"""The rank of your own recipe among the methods of the page: ``python -m bench.accuracy run --recipe-file mine.py``."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from .. import tables
from . import rows, studies
from .methods import load
from .plan import Results, mean_loss
from .rows import RESULTS, RunRow
from .spec import DENSE, Case
from .stats import combined, estimate, verdict
from .tasks.base import settings

TASKS = tuple(name for name in studies.TASKS if name != "translation")
"""The tasks by default: those of the main matrix that run for less than a minute."""

COPY = "recipe.py"
"""The copy of the recipe file in the results folder: its rows are of this text."""


def enter(path: Path, out: Path | None) -> tuple[str, Path]:
    """The name of the file's recipe, now a method, and the folder of its rows.

    Raises:
        ValueError: the file does not define one recipe, or the folder is that of the page.
    """
    name = load(path)
    folder = out or Path(f"accuracy-{name}")
    if folder.resolve() == RESULTS.resolve():
        raise ValueError(f"{folder} holds the page's rows; choose another --out for those of {path}")
    return name, folder


def keep(path: Path, folder: Path) -> None:
    """Copy the recipe file into the folder of its rows.

    Raises:
        ValueError: the folder has rows of another version of the file.
    """
    copy = folder / COPY
    if copy.exists() and copy.read_bytes() != path.read_bytes():
        raise ValueError(f"{folder} has runs of another version of {path}; choose another --out, or delete the folder")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, copy)


def table(name: str, cases: Iterable[Case], folder: Path) -> str:
    """In Markdown, for each case of the method ``name``: all methods with results on the same data, by mean loss, best first.

    Losses of two machines are paired by seed as well: the seed determines data and initial weights.
    """
    mine = rows.load(folder)
    found = Results([*rows.load(RESULTS), *mine])
    parts = [_ranking(case, _comparable(found, case)) for case in cases if case.method == name]
    return "\n\n".join(parts)


def _comparable(found: Results, case: Case) -> dict[str, dict[int, RunRow]]:
    """Method -> seed -> row, of runs as long, with the same optimizer and on the same data as those of ``case``."""
    mine = found.best(case)
    if not mine:
        return {}
    data = next(iter(mine.values())).data
    others = {}
    for other in list(found.cases):
        same = (other.task, other.steps, other.optimizer, other.beta2) == (case.task, case.steps, case.optimizer, case.beta2)
        if same and other.pattern in (case.pattern, DENSE):
            runs = {seed: row for seed, row in found.best(other).items() if row.data == data}
            if runs:
                others[other.method] = runs
    return others


def _ranking(case: Case, runs: dict[str, dict[int, RunRow]]) -> str:
    title = f"`{case.task}`, {case.pattern}, {case.steps} steps"
    if case.method not in runs:
        return f"{title}: no results; see the failed runs above."
    losses = {name: {seed: row.val_loss for seed, row in mine.items()} for name, mine in runs.items()}
    lines = [["", "method", "loss", "minus `dense`", "minus `ste`", "seeds"]]
    for rank, name in enumerate(sorted(runs, key=lambda name: (mean_loss(runs[name]), name)), 1):
        against = [_difference(losses, name, other, settings(case.task).margin) for other in (DENSE, "ste")]
        shown = f"**`{name}`, yours**" if name == case.method else f"`{name}`"
        loss = estimate(losses[name].values())
        lines.append([str(rank), shown, loss.shown(4), *against, str(loss.n + loss.lost)])
    missing = [other for other in (DENSE, "ste") if other not in runs]
    hint = f"\n\nNo rows of {' and '.join(missing)}: add `--methods {' '.join(missing)}` to run them too." if missing else ""
    return f"{title}; loss in nats, 95 % intervals\n\n{tables.table(lines)}{hint}"


def _difference(losses: dict[str, dict[int, float]], name: str, other: str, margin: float) -> str:
    if name == other or other not in losses:
        return "–"
    e = combined([(1, losses[name]), (-1, losses[other])])
    return f"{e.shown(4, sign=True)}, {verdict(e, margin)}"
