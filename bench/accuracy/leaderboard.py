"""The rank of your own recipe among the methods of the page: ``python -m bench.accuracy run --recipe-file mine.py``."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from .. import tables
from . import rows, studies
from .methods import SRSTE, VARIANTS, load
from .plan import Results, mean_loss
from .rows import RESULTS, RunRow
from .spec import DENSE, Case
from .stats import Estimate, combined, estimate, verdict
from .tasks.base import settings

TASKS = tuple(name for name in studies.TASKS if name != "translation")
"""The tasks by default: those of the main matrix that run for less than a minute."""

AGAINST = (DENSE, "ste", SRSTE)
"""What every method is compared with: dense training, the simplest method, and the one whose setting is searched too."""

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
    """In Markdown, for each case of the method ``name``: the methods of the matrix with results on the same data, by mean loss, best first,
    with their differences to dense training, STE and SR-STE; below them controls and other settings of the same methods.

    Losses of two machines are paired by seed as well: the seed determines data and initial weights.
    """
    found = Results([*rows.load(RESULTS), *rows.load(folder)])
    return "\n\n".join(_ranking(case, found) for case in cases if case.method == name)


@dataclass(frozen=True)
class Line:
    """A method at its best rate and, if it has variants, its best variant: the rows by seed, and whether the search is closed."""

    name: str
    runs: dict[int, RunRow]
    closed: bool

    def less(self, other: Line) -> Estimate:
        """The loss less that of another, paired by seed."""
        return combined([(1, {k: r.val_loss for k, r in self.runs.items()}), (-1, {k: r.val_loss for k, r in other.runs.items()})])


def _line(method: str, case: Case, found: Results) -> Line | None:
    """The line of a method on the data of ``case``; None without rows."""
    same = studies.case(case.task, method, case.pattern, case.optimizer, None if method in studies.MATRIX else case.beta2, case.steps)
    known = studies.resolve(same, found)
    runs = found.best(known) if known else {}
    if not known or not runs:
        return None
    setting = "" if known.method == method else f" ({known.method.removeprefix(method).strip('-()')})"
    return Line(f"`{method}`{setting}", runs, found.search(known).closed)


def _ranking(case: Case, found: Results) -> str:
    title = f"`{case.task}`, {case.pattern}, {case.steps} steps"
    mine = _line(case.method, case, found)
    if mine is None:
        return f"{title}: no results; see the failed runs above."
    data = next(iter(mine.runs.values())).data
    variants = {name for names in VARIANTS.values() for name in names}
    every = [*studies.MATRIX, *sorted({other.method for other in list(found.cases)} - {*studies.MATRIX, *variants, case.method})]
    lines = {name: line for name in every if (line := _line(name, case, found))}
    lines = {name: line for name, line in lines.items() if next(iter(line.runs.values())).data == data}
    lines[case.method] = replace(mine, name=f"**{mine.name}, yours**")
    against = {name: lines[name] for name in AGAINST if name in lines}
    head = ["method", "loss", *(f"minus `{name}`" for name in AGAINST), "rate", "search", "seeds"]
    parts = [f"{title}; loss in nats, 95 % intervals; *level* is within {settings(case.task).margin:g}"]
    main = [name for name in lines if name in studies.MATRIX or name == case.method]
    for what, names in (("", main), ("Controls, and other settings:", [name for name in lines if name not in main])):
        if names:
            body = [
                _cells(name, lines[name], against, settings(case.task).margin)
                for name in sorted(names, key=lambda n: mean_loss(lines[n].runs))
            ]
            parts += [*([what] if what else []), tables.table([head, *body])]
    missing = [name for name in AGAINST if name not in lines]
    if missing:
        parts.append(f"No rows of {' and '.join(missing)}: add `--methods {' '.join(missing)}` to run them too.")
    return "\n\n".join(parts)


def _cells(name: str, line: Line, against: dict[str, Line], margin: float) -> list[str]:
    differences = []
    for other in AGAINST:
        e = line.less(against[other]) if other in against and other != name else None
        differences.append("–" if e is None else f"{e.shown(4, sign=True)}, {verdict(e, margin)}")
    loss = estimate(row.val_loss for row in line.runs.values())
    rate = next(iter(line.runs.values())).lr
    return [line.name, loss.shown(4), *differences, f"{rate:g}", "closed" if line.closed else "open", str(loss.n + loss.lost)]
