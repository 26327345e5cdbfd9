"""Write what a recipe says of itself, paper, state, cost, into its page: ``python docs/figures/facts.py``; ``--check`` compares only."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from bench.audit_page import between  # noqa: E402
from nmkernels.cli.recipes import FINAL, describe  # noqa: E402
from nmkernels.recipes.registry import find, names  # noqa: E402

FOLDER = ROOT / "docs" / "methods"
BEGIN, END = "<!-- facts: written by python docs/figures/facts.py -->", "<!-- facts: end -->"


def linked(text: str) -> str:
    """With the arXiv numbers as links."""
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def facts(name: str) -> str:
    """The table of one recipe."""
    told = describe(find(name))
    lines = {
        "paper": linked(told["paper"]),
        "patterns": told["patterns"],
        "kept beside weights and moments": told["extra_state"],
        "cost of training": told["cost"],
        "`finish()` leaves": FINAL.get(told["final"], told["final"]),
    }
    return "\n".join([f"| | `{told['name']}` |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in lines.items())])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 when a page is not up to date")
    args = parser.parse_args(argv)
    stale = 0
    for name in names():
        path = FOLDER / f"{name}.md"
        old = path.read_text(encoding="utf-8")
        new = between(old, BEGIN, END, facts(name))
        if args.check and new != old:
            sys.stdout.write(f"{path.name} does not show what the recipe says of itself; run: python docs/figures/facts.py\n")
            stale = 1
        elif new != old:
            path.write_text(new, encoding="utf-8")
    return stale


if __name__ == "__main__":
    raise SystemExit(main())
