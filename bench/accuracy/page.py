"""``bench/accuracy/README.md``: text by hand, tables and figures by ``python -m bench.accuracy report``."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from . import figures, tables, traces, variance
from .rows import RESULTS, RunRow, load

PAGE = Path(__file__).parent / "README.md"
MARKER = re.compile(r"<!-- (?P<what>[a-z]+) (?P<task>[a-z0-9-]+)(?P<only>(?: [a-z0-9-]+)*) -->\n.*?<!-- end -->", re.DOTALL)
"""``<!-- WHAT TASK METHOD ... -->``, what is written, ``<!-- end -->``; without methods, all of them."""


def piece(what: str, task: str, only: list[str], rows: list[RunRow]) -> str:
    """One table of the page.

    Raises:
        ValueError: the page asks for a table that there is not.
    """
    shared, tuned = tables.shared(rows, task), tables.tuned(rows, task)
    pieces: dict[str, Callable[[], str]] = {
        "shared": lambda: tables.results(shared, only),
        "sharedaccuracy": lambda: tables.results(shared, only, tables.accuracy, 2),
        "tuned": lambda: tables.results(tuned, only, rates=True),
        "tunedaccuracy": lambda: tables.results(tuned, only, tables.accuracy, 2),
        "costs": lambda: tables.costs(shared, only),
        "switches": lambda: tables.switches(rows, task, only),
        "flips": lambda: tables.late(traces.load(RESULTS, task), task, "flip_rate_stride", only),
        "decays": lambda: tables.late(traces.load(RESULTS, task), task, "decay_ratio", only),
        "variance": lambda: variance.summary(variance.load(), task),
        "names": lambda: tables.notes(shared),
    }
    if what not in pieces:
        raise ValueError(f"the page asks for {what!r}, which is no table")
    return pieces[what]()


def render(text: str, rows: list[RunRow]) -> str:
    """The page with every table as the rows have it now."""

    def fresh(match: re.Match[str]) -> str:
        what, task, only = match["what"], match["task"], match["only"].split()
        head = match[0].split("\n", 1)[0]
        return f"{head}\n\n{piece(what, task, only, rows)}\n\n<!-- end -->"

    return MARKER.sub(fresh, text)


def stale(page: Path = PAGE, folder: Path = RESULTS) -> bool:
    """True if a table of the page is not that of the rows."""
    text = page.read_text(encoding="utf-8")
    return render(text, load(folder)) != text


def write(page: Path = PAGE, folder: Path = RESULTS) -> list[Path]:
    """Bring the tables and the figures that the page shows up to date; the figures written come back."""
    rows = load(folder)
    text = render(page.read_text(encoding="utf-8"), rows)
    page.write_text(text, encoding="utf-8")
    drawn = [path for task in sorted({row.task for row in rows}) for path in figures.draw(rows, folder, folder / "figures", task)]
    for path in drawn:
        if path.name not in text:
            path.unlink()
    return [path for path in drawn if path.name in text]
