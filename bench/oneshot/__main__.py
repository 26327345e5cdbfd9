"""``python -m bench.oneshot run | layers | rounding | table``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import torch

from .. import rows
from . import cells, layers, page, rounding


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 if a table is not up to date, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m bench.oneshot", description="What one-shot pruning loses, and what it costs.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="do the cells of the plan that have no row")
    run.add_argument("--models", nargs="+", metavar="MODEL", help=f"of {', '.join(cells.SEQUENCES)}")
    run.add_argument("--cells", nargs="+", default=["*"], metavar="KEY", help="with wildcards: 'minilm/2:4/*', 'gpt/*/admm/held/*'")
    run.add_argument("--again", action="store_true", help="also cells that have a row, which is replaced")
    run.add_argument("--list", action="store_true", help="only list them")
    run.add_argument("--out", type=Path, default=cells.PATH, metavar="CSV")
    one = verbs.add_parser("layers", help="seconds and memory of one square layer, by method")
    one.add_argument("--size", type=int, default=4096)
    one.add_argument("--repeats", type=int, default=3)
    one.add_argument("--methods", nargs="+", default=list(layers.METHODS), metavar="METHOD", choices=layers.METHODS)
    one.add_argument("--out", type=Path, default=layers.PATH, metavar="CSV")
    integers = verbs.add_parser("rounding", help="integers as values, with and without 2:4, in both orders")
    integers.add_argument("--models", nargs="+", default=["smollm2", "minilm"])
    integers.add_argument("--out", type=Path, default=rounding.PATH, metavar="CSV")
    table = verbs.add_parser("table", help=f"write the tables of {page.PAGE.name} and {rounding.PAGE.name}")
    table.add_argument("--check", action="store_true", help="write nothing, exit 1 if a table does not agree with the rows")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # part of the machine's name
    rows.commit()  # cached now, since the tree may change before the last row is written
    try:
        return {"run": _run, "layers": _layers, "rounding": _rounding, "table": _table}[args.verb](args)
    except (RuntimeError, ImportError) as error:
        print(f"python -m bench.oneshot: error: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    done = set() if args.again else {row.key for row in cells.load(args.out)}
    chosen = {cell.key: cell for cell in cells.plan() if not args.models or cell.model in args.models}
    todo = [cell for key, cell in chosen.items() if key not in done and any(fnmatch(key, pattern) for pattern in args.cells)]
    for number, cell in enumerate(todo, 1):
        if args.list:
            print(cell.key)
            continue
        row = cells.run(cell)
        cells.append(row, args.out)
        found = {name: getattr(row, name) for name in ("loss", "accuracy", "cosine", "error")}
        said = ", ".join(f"{name} {value:.4f}" for name, value in found.items() if value == value)
        print(f"[{number}/{len(todo)}] {cell.key}: {said}; {row.pruning:.0f} s pruning, {row.seconds:.0f} s", flush=True)
    return 0


def _layers(args: argparse.Namespace) -> int:
    for name in args.methods:
        found = layers.measure(name, args.size, args.repeats)
        rows.append(found, args.out)
        print(f"{name} {args.size}×{args.size}: " + ", ".join(f"{r.metric} {r.p50:g}" for r in found), flush=True)
    return 0


def _rounding(args: argparse.Namespace) -> int:
    rounding.measure(tuple(args.models), args.out)
    return 0


def _table(args: argparse.Namespace) -> int:
    return max(page.write(check=args.check), rounding.write(check=args.check))


if __name__ == "__main__":
    raise SystemExit(main())
