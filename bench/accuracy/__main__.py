"""``python -m bench.accuracy run|status|merge|report``: train, say how far the plan is, add other folders, write tables and figures."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from . import page, rows, runner, tasks, traces
from .plan import STAGES, best_rates, pending, plan
from .rows import RESULTS, RunRow
from .spec import RunSpec, mean_and_error
from .worker import with_flops


def main(argv: Sequence[str] | None = None) -> int:
    """0 done, 1 with failed runs, 2 refused, 130 interrupted with the way to resume."""
    args = _parser().parse_args(argv)
    try:
        return {"run": _run, "status": _status, "merge": _merge, "report": _report}[args.verb](args)
    except ValueError as error:
        print(f"python -m bench.accuracy: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped; finished rows are kept. The same command goes on.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, text in (("run", "do the runs that are missing"), ("status", "say how far the plan is")):
        p = verbs.add_parser(verb, help=text)
        p.add_argument(
            "--stages", nargs="+", default=["shared", "tune", "tuned"], metavar="STAGE", help=f"of {', '.join(STAGES)}, in this order"
        )
        p.add_argument("--tasks", nargs="+", default=["gpt", "vit"], metavar="TASK", help=f"of {', '.join(tasks.names())}")
        p.add_argument("--methods", nargs="+", default=[], metavar="METHOD", help="instead of all of the stage")
        p.add_argument("--patterns", nargs="+", default=[], metavar="N:M", help="instead of all of the stage")
        p.add_argument("--seeds", type=int, default=5, help="how many of the evaluation seeds, default 5")
        p.add_argument("--out", type=Path, default=RESULTS, help="folder of runs.csv and the traces")
        if verb == "run":
            p.add_argument("--workers", type=int, default=2, help="processes of one thread each, default 2")
            p.add_argument("--limit", type=int, help="at most so many runs")
    merge = verbs.add_parser("merge", help="add the runs of other folders, done beside this one or on another machine")
    merge.add_argument("folders", nargs="+", type=Path)
    merge.add_argument("--out", type=Path, default=RESULTS, help="folder of runs.csv and the traces")
    report = verbs.add_parser("report", help="count FLOPs, write the page's tables and figures")
    report.add_argument("--check", action="store_true", help="write nothing, exit 1 when a table is not that of the rows")
    return parser


def _merge(args: argparse.Namespace) -> int:
    for folder in args.folders:
        new = rows.load(folder)
        rows.save({row.spec.key: row for row in [*rows.load(args.out), *new]}.values(), args.out)
        for task in sorted({row.task for row in new}):
            traces.append(traces.load(folder, task), args.out, task)
        print(f"{folder}: {len(new)} runs")
    return 0


def _report(args: argparse.Namespace) -> int:
    if args.check:
        if page.stale():
            print("bench/accuracy/README.md does not show the rows; run: python -m bench.accuracy report")
        return int(page.stale())
    rows.save(with_flops(row) for row in rows.load())
    for path in page.write():
        print(path)
    return 0


def _specs(args: argparse.Namespace, stage: str, task: str, done: list[RunRow]) -> list[RunSpec]:
    return plan(stage, task, done, args.methods, args.patterns, args.seeds)


def _run(args: argparse.Namespace) -> int:
    for stage in args.stages:
        for task in args.tasks:
            _specs(args, stage, task, [])  # names are checked before hours are spent
    failed, left = 0, args.limit
    for stage in args.stages:
        for task in args.tasks:
            done = rows.load(args.out)
            todo = pending(_specs(args, stage, task, done), done)[:left]
            runner.say(f"{stage} {task}: {len(todo)} runs to do")
            failed += len(runner.run_all(todo, args.out, args.workers))
            left = None if left is None else left - len(todo)
    if failed:
        runner.say(f"{failed} runs failed; the same command tries them again")
    return 1 if failed else 0


def _status(args: argparse.Namespace) -> int:
    done = rows.load(args.out)
    for task in args.tasks:
        for stage in args.stages:
            specs = _specs(args, stage, task, done)
            print(f"{task} {stage}: {len(specs) - len(pending(specs, done))} of {len(specs)} runs done")
            _means(specs, {row.spec.key: row for row in done})
        if rates := best_rates(done, task):
            print(f"{task} rates found: " + ", ".join(f"{m} {p} {lr:g}" for (m, p), lr in sorted(rates.items())))
    return 0


def _means(specs: list[RunSpec], by_key: dict[str, RunRow]) -> None:
    groups: dict[tuple[str, str, float], list[RunRow]] = defaultdict(list)
    for spec in specs:
        if spec.key in by_key:
            groups[spec.pattern, spec.method, spec.lr].append(by_key[spec.key])
    for (pattern, method, lr), found in sorted(groups.items()):
        mean, error = mean_and_error([row.val_loss for row in found])
        accuracy, spread = mean_and_error([row.accuracy for row in found])
        more = f"  {accuracy:.2f} ± {spread:.2f} %" if accuracy == accuracy else ""
        bad = sum(row.status != "ok" for row in found)
        print(f"  {pattern:6} {method:16} lr {lr:<7g} {mean:.4f} ± {error:.4f}{more}  n={len(found)}" + (f" diverged {bad}" if bad else ""))


if __name__ == "__main__":
    raise SystemExit(main())
