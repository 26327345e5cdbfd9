"""Writes ``bench/accuracy/README.md`` from the jinja2 template ``page.md`` and the rows: ``python -m bench.accuracy report``.

Every measured number, and every word that depends on one, is a placeholder, so that no sentence can contradict the rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from . import costs, figures, methods, rankings, tables, traces, variance
from .cells import Cells, accuracy, bleu, other_loss
from .contrasts import findings
from .figures import Figure
from .rows import REPEATS, RESULTS, load
from .tasks.base import settings

FOLDER = Path(__file__).parent
TEMPLATE, PAGE = FOLDER / "page.md", FOLDER / "README.md"
FIGURES = "figures"

NUMBER = re.compile(r"\d+[.]\d+(?:e[-−]?\d+)?|±|\d+ ?%")
"""Text that the template may have only inside a placeholder or code."""

ALLOWED = {"95 %", "10 %", "50 %"}
"""Allowed literals: the level of the intervals, and the bounds of AutoSwitch."""

NOT_TEXT = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}|```.*?```|`[^`\n]*`|\]\([^)\n]*\)", re.DOTALL)
"""Placeholders, statements, comments, code and the targets of links."""

INSTEAD = "does not show the rows; run: python -m bench.accuracy report"


def render(template: str, cells: Cells, folder: Path = RESULTS) -> tuple[str, dict[str, Figure]]:
    """The page, and its figures by file name, from the rows.

    Args:
        folder: of the traces.

    Raises:
        jinja2.UndefinedError: the template uses an unknown name.
    """
    shown: dict[str, Figure] = {}

    def figure(name: str, text: str, found: Figure) -> str:
        if not found.lines:
            return ""
        shown[f"{name}.svg"] = found
        return f"![{text}](../results/accuracy/{FIGURES}/{name}.svg)"

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(_functions(cells, folder), figure=figure)
    text = environment.from_string(template).render()
    # remove the blank lines of parts that have no rows
    return re.sub(r"\n{3,}", "\n\n", text), shown


def _functions(cells: Cells, folder: Path) -> dict[str, Any]:
    """The names available in the template; all but ``settings`` and lists of names read rows."""
    of_cells: dict[str, Callable[..., Any]] = {
        "primary": tables.primary,
        "results": tables.results,
        "gaps": tables.gaps,
        "by_rate": tables.by_rate,
        "controls": tables.controls,
        "by_length": tables.by_length,
        "equal_flops": tables.equal_flops,
        "switches": tables.switches,
        "ablation": tables.ablation,
        "betas": tables.betas,
        "autoswitch": tables.autoswitch,
        "progress": tables.progress,
        "repeats": tables.repeats,
        "flops_table": tables.flops,
        "notes": tables.notes,
        "task_table": tables.task_table,
        "best_methods": rankings.best_methods,
        "smallest_and_best": tables.smallest_and_best,
        "rate_ratio": tables.rate_ratio,
        "same_rate": rankings.same_rate,
        "compare": rankings.compare,
        "everywhere": rankings.everywhere,
        "longer": rankings.longer,
        "finding": rankings.finding,
        "at_chance": rankings.at_chance,
        "spent": costs.spent,
        "rates_figure": figures.rates,
        "flops_figure": figures.flops,
    }
    return {
        **{name: partial(function, cells) for name, function in of_cells.items()},
        "moments_figure": partial(figures.moments, cells, folder),
        "decays": lambda task, beta2, only: tables.late(traces.load(folder, task), task, "decay_ratio", beta2, only),
        "variance": lambda task, beta2: variance.summary([x for x in variance.load(folder) if float(x["beta2"]) == beta2], task),
        "variances": sorted({(line["task"], float(line["beta2"])) for line in variance.load(folder)}),
        "estimates": costs.estimates,
        "findings": findings(cells),
        "spread": cells.spread,
        "settings": settings,
        "accuracy": accuracy,
        "bleu": bleu,
        "other_loss": other_loss,
        "tasks": sorted(cells.tasks),
        "main": list(methods.CORE),
        "others": methods.others(),
    }


def literals(template: str) -> list[str]:
    """Numbers written as text in the template that look measured, with their lines.

    Example:
        >>> literals("at 0.99, code `0.99`, {{ 0.99 }}")
        ['line 1: 0.99']
    """
    # blanks keep the line numbers
    text = NOT_TEXT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), template)
    lines = enumerate(text.splitlines(), 1)
    return [f"line {i}: {match[0]}" for i, line in lines for match in NUMBER.finditer(line) if match[0] not in ALLOWED]


def problems(template: Path = TEMPLATE, page: Path = PAGE, folder: Path = RESULTS) -> list[str]:
    """Everything on the page that disagrees with the rows; empty if nothing does."""
    text = template.read_text(encoding="utf-8")
    found = [f"{template.name}, {where}: a number that does not come from a row; make it a placeholder" for where in literals(text)]
    cells = _cells(folder)
    found += [f"the rows of {task} are of several data sets, which must not be compared" for task in cells.mixed()]
    new, shown = render(text, cells, folder)
    if not page.exists() or page.read_text(encoding="utf-8") != new:
        found.append(f"{page.name} {INSTEAD}")
    drawn = {path.name for path in (folder / FIGURES).glob("*.svg")}
    stale = [name for name, figure in shown.items() if not figures.current(figure, folder / FIGURES / name)]
    return found + [f"{FIGURES}/{name} {INSTEAD}" for name in sorted({*stale, *(drawn - set(shown))})]


def write(template: Path = TEMPLATE, page: Path = PAGE, folder: Path = RESULTS) -> list[Path]:
    """Update the page and its figures; returns the paths that changed."""
    new, shown = render(template.read_text(encoding="utf-8"), _cells(folder), folder)
    changed = []
    if not page.exists() or page.read_text(encoding="utf-8") != new:
        page.write_text(new, encoding="utf-8")
        changed.append(page)
    for path in (folder / FIGURES).glob("*.svg"):
        if path.name not in shown:
            path.unlink()
            changed.append(path)
    for name, figure in shown.items():
        path = folder / FIGURES / name
        if not figures.current(figure, path) and figures.draw(figure, path):
            changed.append(path)
    return changed


def _cells(folder: Path) -> Cells:
    return Cells(load(folder), load(folder, REPEATS))
