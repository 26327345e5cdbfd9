"""Write each recipe's facts (paper, state, cost) into its page, and a table of all recipes into the index.

    python docs/figures/facts.py [--check]

``--check`` compares only.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import nmkernels as nm  # noqa: E402
from bench.accuracy import page, tables  # noqa: E402
from bench.tables import between  # noqa: E402
from nmkernels.cli.recipes import FINAL, describe  # noqa: E402
from nmkernels.recipes.registry import find, names  # noqa: E402

FOLDER = ROOT / "docs" / "methods"
GROUPS = {
    "A mask by magnitude": ("ste", "srste", "step", "ast", "asp"),
    "A mask that fades in or tightens": ("mdgf", "sdgf", "maxq"),
    "A continuous projection": ("sste",),
    "Sparse backward passes too": ("fst", "slope", "bimask"),
    "Masks that are learned": ("maskllm", "lbc", "proxsparse"),
    "Other groups, other layers": ("vnm", "complementary", "layerwise", "act24"),
    "To compare with": ("dense",),
}
TABLE, TABLE_END = "<!-- recipes: written by python docs/figures/facts.py -->", "<!-- recipes: end -->"
LAYERS, STEPS, TOKENS = {"up": (4096, 1024), "down": (1024, 4096)}, 10_000, 4096
BEGIN, END = "<!-- facts: written by python docs/figures/facts.py -->", "<!-- facts: end -->"


def linked(text: str) -> str:
    """Turn arXiv numbers into links."""
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def facts(name: str) -> str:
    """The table of one recipe."""
    about = describe(find(name))
    lines = {
        "paper": linked(about["paper"]),
        "patterns": about["patterns"],
        "extra state": about["extra_state"],
        "cost of training": about["cost"],
        "`finish()` leaves": FINAL.get(about["final"], about["final"]),
    }
    return "\n".join([f"| | `{about['name']}` |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in lines.items())])


def table() -> str:
    """The table of all recipes: summary, training FLOPs of sparse layers as a share of dense ones, the final weights, and the evidence."""
    lines = ["| recipe | what it is | FLOPs | leaves | ahead, behind |", "| --- | --- | --- | --- | --- |"]
    wins = page.read().wins("2:4")
    for group, members in GROUPS.items():
        lines.append(f"| | **{group}** | | | |")
        for name in members:
            about = describe(find(name))
            recipe = nm.recipes.get(f"{name}:{'2:8' if name == 'vnm' else '2:4'}", total_steps=STEPS)
            ratio = nm.flops(LAYERS, recipe, STEPS, tokens=TOKENS).training_ratio
            summary = about["summary"].partition(": ")[2] or about["summary"]
            what = FINAL.get(about["final"], about["final"]).partition(",")[0]
            won = wins.get(tables.METHOD.get(name, name))
            evidence = "–" if name == "dense" else "untested" if won is None else "{}, {}".format(*won)
            lines.append(f"| [`{name}`]({name}.md) | {summary[:1].upper() + summary[1:]} | {ratio:.2f} | {what} | {evidence} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if a page is not up to date")
    args = parser.parse_args(argv)
    stale = 0
    pages = [(FOLDER / f"{name}.md", BEGIN, END, facts(name)) for name in names()]
    for path, begin, end, text in [*pages, (FOLDER / "index.md", TABLE, TABLE_END, table())]:
        old = path.read_text(encoding="utf-8")
        new = between(old, begin, end, text)
        if args.check and new != old:
            sys.stdout.write(f"{path.name} is not up to date; run: python docs/figures/facts.py\n")
            stale = 1
        elif new != old:
            path.write_text(new, encoding="utf-8")
    return stale


if __name__ == "__main__":
    raise SystemExit(main())
