"""``python -m nmkernels recipes``: list the registered training methods, or show one of them with all of its keywords."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import textwrap
from dataclasses import MISSING, Field, asdict, fields
from typing import Any

from ..recipes import names
from ..recipes.registry import find

COLUMNS = 112
WIDTH = 11  # columns for the label of each line
FINAL = {"nm": "N:M weights, ready to compress", "dense": "dense weights", "nm+adapter": "N:M weights and a low-rank adapter"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="show the equations and keywords of this recipe; default: list all")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the list, or one recipe; 0, or 1 through ``RecipeError`` where no recipe has that name."""
    # NAME:N:M is accepted too
    described = describe(find(args.name.partition(":")[0])) if args.name else [describe(find(name)) for name in names()]
    if args.json:
        print(json.dumps(described, indent=2, ensure_ascii=False))
    elif isinstance(described, dict):
        width = max(len(k["name"]) for k in described["keywords"])
        heading = 'Keywords, as in nm.recipes.get("NAME:N:M", KEY=VALUE) or nm.recipes.get("NAME:N:M(KEY=VALUE)").'
        keywords = [f"  {k['name'].ljust(width)} = {k['default']!r:<14} {k['type']}" for k in described["keywords"]]
        print("\n".join([*_head(described), "", heading, *keywords, "", described["doc"]]))
    else:
        print("\n\n".join("\n".join(_head(each)) for each in described))
        print('\npython -m nmkernels recipes NAME shows more; nm.recipes.get("NAME:N:M", total_steps=STEPS) makes one.')
    return 0


def describe(cls: type[Any]) -> dict[str, Any]:
    """A recipe as plain values: its facts, its ``keywords`` (name, type, default), and its docstring."""
    about = {"name": cls.name, **asdict(cls.about), "final": cls(total_steps=1000).final}  # final may depend on keywords
    types = {f.name: str(f.type).replace("PatternLike", "N:M").replace(" | None", ", or None") for f in fields(cls)}
    keywords = [{"name": f.name, "type": types[f.name], "default": _default(f)} for f in fields(cls) if f.init]
    # the first line of the module's docstring, or of the class's where the module has several recipes
    alone = sum(find(name).__module__ == cls.__module__ for name in names()) == 1
    summary = (inspect.getdoc(sys.modules[cls.__module__] if alone else cls) or "").partition("\n")[0].rstrip(".")
    return {"name": about.pop("name"), "summary": summary, **about, "keywords": keywords, "doc": inspect.getdoc(cls) or ""}


def _head(r: dict[str, Any]) -> list[str]:
    """The lines with a recipe's name, summary and facts."""
    facts = {
        "paper": r["paper"],
        "patterns": r["patterns"],
        "state": r["extra_state"],
        "cost": r["cost"],
        "leaves": FINAL.get(r["final"], r["final"]),
    }
    lines = [f"{r['name']:<{WIDTH - 2}}  {r['summary']}"]
    for key, text in facts.items():
        lines += textwrap.wrap(text, COLUMNS, initial_indent=f"  {key:<{WIDTH - 2}}", subsequent_indent=" " * WIDTH)
    return lines


def _default(field: Field[Any]) -> Any:
    value = None if field.default is MISSING else field.default
    return value if isinstance(value, (int, float, str, type(None))) else str(value)
