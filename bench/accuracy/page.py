"""Writes the pages from the jinja2 templates in ``pages`` and the rows: ``python -m bench.accuracy report``.

Every measured number, and every word that depends on one, is a placeholder, so that no sentence can contradict the rows.
"""

from __future__ import annotations

import re
from pathlib import Path

import jinja2

from . import short, sizes, studies, tables
from .methods import DECAYS
from .rows import AGAIN, RESULTS, load
from .tables import Tables

FOLDER, ROOT = Path(__file__).parent, Path(__file__).parents[2]
PAGES = {
    FOLDER / "pages/matrix.md": FOLDER / "README.md",
    FOLDER / "pages/rates.md": FOLDER / "rates.md",
    FOLDER / "pages/step.md": ROOT / "docs/methods/step-evidence.md",
}
"""Template -> page."""

NUMBER = re.compile(r"\d+[.]\d+(?:e[-−]?\d+)?|±|\d+ ?%")
"""Text that a template may have only inside a placeholder or code."""

ALLOWED = {"95 %", "5 %", "10 %", "25 %", "50 %"}
"""Allowed literals: the level of intervals and tests, and settings of STEP."""

NOT_TEXT = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}|```.*?```|`[^`\n]*`|\]\([^)\n]*\)", re.DOTALL)
"""Placeholders, statements, comments, code and the targets of links."""


def render(template: str, shown: Tables) -> str:
    """A page from its template.

    Raises:
        jinja2.UndefinedError: the template uses an unknown name.
    """
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(t=shown, notes=tables.notes, matrix=studies.MATRIX, studies=studies.STUDIES, short=short.text)
    environment.globals.update(decays=list(DECAYS.values()), sizes=sizes, lengths=shown.lengths())
    return environment.from_string(template).render()


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


def problems(folder: Path = RESULTS, pages: dict[Path, Path] = PAGES) -> list[str]:
    """Everything on the pages that disagrees with the rows; empty if nothing does."""
    shown = read(folder)
    found = [f"the rows of {task} are of several data sets, which must not be compared" for task in shown.mixed()]
    for template, page in pages.items():
        text = template.read_text(encoding="utf-8")
        found += [f"{template.name}, {where}: a number that does not come from a row; make it a placeholder" for where in literals(text)]
        if not page.exists() or page.read_text(encoding="utf-8") != render(text, shown):
            found.append(f"{page.name} does not show the rows; run: python -m bench.accuracy report")
    return found


def write(folder: Path = RESULTS, pages: dict[Path, Path] = PAGES) -> list[Path]:
    """Update the pages; returns those that changed."""
    shown, changed = read(folder), []
    for template, page in pages.items():
        new = render(template.read_text(encoding="utf-8"), shown)
        if not page.exists() or page.read_text(encoding="utf-8") != new:
            page.write_text(new, encoding="utf-8")
            changed.append(page)
    return changed


def read(folder: Path = RESULTS) -> Tables:
    """The tables of a folder's rows."""
    return Tables(load(folder), load(folder, AGAIN))
