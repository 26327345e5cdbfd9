"""Turns the rows of ``bench/results`` into the table of the README: ``python -m bench.report``, or ``--check`` to compare only."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- results: written by python -m bench.report -->", "<!-- results end -->"
TIMES = {"us", "ms", "s"}
OURS = "nmkernels"
LEFT_OUT = {"step_clamp.csv"}
"""Evidence for a default, told where the default is; the README's table is for figures that a user chooses by."""


def load(folder: Path) -> list[dict[str, str]]:
    """The rows of the CSVs in ``folder`` that the README shows, in the order of file names and lines."""
    rows: list[dict[str, str]] = []
    for path in sorted(path for path in folder.glob("*.csv") if path.name not in LEFT_OUT):
        with path.open(newline="", encoding="utf-8") as file:
            rows += csv.DictReader(file)
    return rows


def markdown(rows: Iterable[dict[str, str]]) -> str:
    """One table per machine: for each case the median of every provider, and on our line the ratio where times compare."""
    every = list(rows)
    if not every:
        return "No measurements are committed yet."
    parts = []
    for machine in dict.fromkeys(r["machine"] for r in every):
        mine = sorted((r for r in every if r["machine"] == machine), key=_case)
        versions, dates, commits = (", ".join(sorted({r[k] for r in mine})) for k in ("versions", "date", "commit"))
        lines = [
            f"**{machine}** ({versions}; {dates}; commit {commits})",
            "",
            "| what | provider | median (p20 to p80) | unit | ratio |",
            "| --- | --- | --- | --- | --- |",
        ]
        for case, group in groupby(mine, key=_case):
            lines += _lines(" ".join(c for c in case[:-1] if c), case[-1], list(group))
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _case(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(row[k] for k in ("op", "pattern", "dtype", "shape", "metric"))


def _lines(what: str, metric: str, rows: list[dict[str, str]]) -> list[str]:
    others = [float(r["p50"]) for r in rows if not r["provider"].startswith(OURS)]
    lines = []
    for r in rows:
        spread = f" ({_short(r['p20'])} to {_short(r['p80'])})" if r["p20"] != r["p80"] else ""
        # against the fastest of the others, so that the ratio flatters nobody
        compares = metric in TIMES and others and r["provider"].startswith(OURS)
        ratio = f"{min(others) / float(r['p50']):.2f}×" if compares else ""
        lines.append(f"| {what} | {r['provider']} | {_short(r['p50'])}{spread} | {metric} | {ratio} |")
        what = ""
    return lines


def _short(number: str) -> str:
    return f"{float(number):.4g}"


def insert(text: str, table: str) -> str:
    """``text`` with what stands between the two markers replaced; ``ValueError`` unless it has each once, in order."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the text must have the lines {BEGIN!r} and {END!r}, once each and in this order")
    return f"{text[: text.index(BEGIN)]}{BEGIN}\n\n{table}\n\n{text[text.index(END) :]}"


def main(argv: list[str] | None = None, readme: Path = README, results: Path = RESULTS) -> int:
    """Write the table into the README; with ``--check`` write nothing and return 1 when it is not up to date."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 when the README is not up to date")
    args = parser.parse_args(argv)
    old = readme.read_text(encoding="utf-8")
    new = insert(old, markdown(load(results)))
    if args.check:
        if new != old:
            print(f"{readme.name} does not show the rows of {results.name}/; run: python -m bench.report")
        return int(new != old)
    readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
