"""``python -m bench.accuracy fetch|run|status|merge|report``: download data, train, show progress, add other folders, write the page."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path

import torch

from . import data, page, rows, runner, tasks, traces
from .plan import STAGES, best_rates, cost, foreseen, pending, plan
from .rows import REPEATS, RESULTS, RUNS, RunRow
from .spec import OPTIMIZERS, RunSpec, mean_and_error, unknown
from .tasks.base import settings
from .worker import with_flops


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 with failed runs, 2 wrong usage, 130 interrupted."""
    args = _parser().parse_args(argv)
    torch.set_num_threads(1)  # as in the workers, since it is part of the machine's name
    try:
        return {"fetch": _fetch, "run": _run, "status": _status, "merge": _merge, "report": _report}[args.verb](args)
    except (ValueError, RuntimeError) as error:
        print(f"python -m bench.accuracy: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped; finished rows are kept. Run the same command again to continue.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    fetch = verbs.add_parser("fetch", help="download the data of these tasks, or of all, into a cache outside the repository")
    fetch.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(data.SOURCES)}")
    for verb, text in (("run", "do the runs that are missing"), ("status", "show the progress of the plan, and what is left in CPU-hours")):
        p = verbs.add_parser(verb, help=text)
        p.add_argument("--tasks", nargs="+", default=["gpt", "vit"], metavar="TASK", help=f"of {', '.join(tasks.names())}")
        p.add_argument("--stages", nargs="+", default=[], metavar="STAGE", help=f"of {', '.join(STAGES)}; by default the task's own")
        p.add_argument("--methods", nargs="+", default=[], metavar="METHOD", help="instead of all of the stage")
        p.add_argument("--patterns", nargs="+", default=[], metavar="N:M", help="instead of all of the stage")
        p.add_argument(
            "--optimizers", nargs="+", default=[], metavar="OPTIMIZER", help=f"of {', '.join(OPTIMIZERS)}; by default the task's own"
        )
        p.add_argument("--seeds", type=int, help="number of evaluation seeds; default the task's own")
        p.add_argument("--out", type=Path, default=RESULTS, help="folder of runs.csv and the traces")
        if verb == "run":
            p.add_argument("--workers", type=int, default=2, help="processes of one thread each, default 2")
            p.add_argument("--limit", type=int, help="at most so many runs")
    merge = verbs.add_parser("merge", help="add the runs of other folders, such as those of another machine")
    merge.add_argument("folders", nargs="+", type=Path)
    merge.add_argument("--out", type=Path, default=RESULTS, help="folder of runs.csv and the traces")
    report = verbs.add_parser("report", help="count FLOPs, and write the page's tables and figures")
    report.add_argument("--check", action="store_true", help="write nothing, exit 1 if the page does not agree with the rows")
    return parser


def _fetch(args: argparse.Namespace) -> int:
    data.fetch(args.tasks)
    return 0


def _merge(args: argparse.Namespace) -> int:
    for folder in args.folders:
        new = rows.load(folder)
        for name in (RUNS, REPEATS):
            if more := rows.load(folder, name):
                rows.append(more, args.out, name)
                rows.tidy(args.out, name)
        for task in sorted({row.task for row in new}):
            traces.append(traces.load(folder, task), args.out, task)
            traces.tidy(args.out, task)
        print(f"{folder}: {len(new)} runs")
    return 0


def _report(args: argparse.Namespace) -> int:
    if args.check:
        found = page.problems()
        print("\n".join(found) or "every number and figure of the page agrees with the rows")
        return int(bool(found))
    rows.save(row if row.training_flops else with_flops(row) for row in rows.load())
    for path in page.write():
        print(path)
    return 0


def _stages(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(stage, task) in the order of the stages, so that tasks advance together and rates are known before they are used."""
    for name in args.stages:
        if name not in STAGES:
            raise ValueError(unknown("stage", name, STAGES))
    pairs = [(stage, task) for stage in STAGES for task in args.tasks if stage in (args.stages or settings(task).stages)]
    for stage, task in pairs:
        _specs(args, stage, task, [])  # check the names before spending hours
    return pairs


def _specs(args: argparse.Namespace, stage: str, task: str, done: list[RunRow]) -> list[RunSpec]:
    return plan(stage, task, done, args.methods, args.patterns, args.seeds, args.optimizers)


def _run(args: argparse.Namespace) -> int:
    pairs = _stages(args)
    for task in set(args.tasks) & set(data.SOURCES):
        data.files(task)  # report a missing download once, before anything runs
    failed, left = 0, args.limit
    with runner.processes(args.workers) as pool:
        for stage, task in pairs:
            did, bad = _run_stage(args, stage, task, pool, left)
            failed += bad
            left = None if left is None else left - did
    if failed:
        runner.say(f"{failed} runs failed; the same command tries them again")
    return 1 if failed else 0


def _run_stage(args: argparse.Namespace, stage: str, task: str, pool: Executor, limit: int | None) -> tuple[int, int]:
    done = rows.load(args.out)
    todo = pending(_specs(args, stage, task, done), _done(args, stage, done))
    runner.say(f"{stage} {task}: {len(todo)} runs to do" + (", and what they ask for" if stage == "tune" else ""))
    if stage == "repeat":
        todo = todo[:limit]
        return len(todo), len(runner.run_all(todo, args.out, pool, args.workers, name=REPEATS))
    return runner.run_stage(lambda done: _specs(args, stage, task, done), args.out, pool, args.workers, limit)


def _done(args: argparse.Namespace, stage: str, done: list[RunRow]) -> list[RunRow]:
    """The rows that count as done for a stage; repeats count only from this machine."""
    if stage != "repeat":
        return done
    return [row for row in rows.load(args.out, REPEATS) if row.machine == rows.stamp()["machine"]]


def _status(args: argparse.Namespace) -> int:
    done, ahead, every = rows.load(args.out), dict[str, list[RunRow]](), dict[str, RunSpec]()
    by_key = {row.spec.key: row for row in done}
    for stage, task in _stages(args):
        if task not in ahead:
            ahead[task] = foreseen(done, task, args.methods, args.patterns)
        specs = _specs(args, stage, task, ahead[task])
        left = pending(specs, _done(args, stage, done))
        every |= {spec.key: spec for spec in left}  # a run of two stages is done once
        print(f"{task} {stage}: {len(specs) - len(left)} of {len(specs)} runs done, {cost(left):.2f} CPU-hours left")
        _means(specs, by_key)
    print(f"{cost(every.values()):.2f} CPU-hours left, more where a search moves on")
    for task in args.tasks:
        _rates(task, done)
    return 0


def _rates(task: str, done: list[RunRow]) -> None:
    for optimizer in OPTIMIZERS:
        for (method, pattern), found in sorted(best_rates(done, task, optimizer).items()):
            state = "closed" if found.closed else "open" if found.over else "searching"
            tried = f"{found.below} rates below, {found.above} above"
            print(f"{task} rate of {method} {pattern} {optimizer}: {found.rate:g}, {state}, {tried}")


def _means(specs: list[RunSpec], by_key: dict[str, RunRow]) -> None:
    groups: dict[tuple[str, str, str, int, float], list[RunRow]] = defaultdict(list)
    for spec in specs:
        if spec.key in by_key:
            groups[spec.pattern, spec.method, spec.optimizer, spec.steps, spec.lr].append(by_key[spec.key])
    for (pattern, method, optimizer, steps, lr), found in sorted(groups.items()):
        mean, error = mean_and_error([row.val_loss for row in found])
        accuracy, spread = mean_and_error([row.accuracy for row in found])
        more = f"  {accuracy:.2f} ± {spread:.2f} %" if accuracy == accuracy else ""
        bad = sum(row.status != "ok" for row in found)
        more += f"  n={len(found)}" + (f" diverged {bad}" if bad else "")
        print(f"  {pattern:6} {method:16} {optimizer:6} {steps:6} steps  lr {lr:<7g} {mean:.4f} ± {error:.4f}{more}")


if __name__ == "__main__":
    raise SystemExit(main())
