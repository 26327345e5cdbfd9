"""``python -m bench.accuracy VERB``: what models lose by each recipe, and by one-shot pruning.

fetch: download data; run, status, merge: train, show progress, add other folders; prune, layers, rounding: one-shot pruning of pretrained
models, what it costs for a layer, and integers as values; short: why sparse methods are ahead in short runs; report: write the pages."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import torch

from .. import rows as machine_rows
from . import data, layers, leaderboard, methods, oneshot, oneshot_page, rounding, rows, runner, short, studies, tasks
from .place import PARALLEL, Place
from .plan import Results
from .rows import AGAIN, RESULTS, RUNS
from .spec import Case, RunSpec, find
from .stats import estimate


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 with failed runs, 2 wrong usage, 130 interrupted."""
    args = _parser().parse_args(argv)
    torch.set_num_threads(1)  # as in the workers, since it is part of the machine's name
    try:
        return int(args.do(args) or 0)
    except (ValueError, RuntimeError, ImportError) as error:
        print(f"python -m bench.accuracy: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped; finished rows are kept. Run the same command again to continue.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy", description=__doc__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    fetch = verbs.add_parser("fetch", help="download the data of these tasks, or of all, into a cache outside the repository")
    fetch.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(data.SOURCES)}")
    fetch.set_defaults(do=lambda args: data.fetch(args.tasks))
    for do, text in ((_run, "do the runs that are missing"), (_status, "show rates, losses, and what is left in CPU-hours")):
        p = verbs.add_parser(do.__name__[1:], help=text)
        p.set_defaults(do=do)
        p.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(studies.STUDIES)}; by default {DEFAULT}")
        p.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help=f"instead of the study's: of {', '.join(tasks.names())}")
        p.add_argument("--methods", nargs="+", default=[], metavar="METHOD", help="instead of the study's")
        p.add_argument("--recipe-file", type=Path, metavar="FILE", help="a Python file with your own recipe, to run instead and to rank")
        p.add_argument("--patterns", nargs="+", default=[], metavar="N:M", help="instead of the study's")
        p.add_argument("--seeds", type=int, help="number of evaluation seeds; default the task's own")
        p.add_argument("--out", type=Path, help="folder of runs.csv; default the page's, and accuracy-NAME for a recipe file")
        if do is _run:
            p.add_argument("--workers", type=int, default=2, help="processes of one thread each, default 2; on a GPU there is one")
            p.add_argument("--again", nargs="+", default=[], metavar="RUN", help="do these runs, by their keys, again on this machine")
            p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
            p.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
            p.add_argument("--parallel", choices=PARALLEL[1:], default="", help="under torchrun: how the processes share a model")
    merge = verbs.add_parser("merge", help="add the runs of other folders, such as those of another machine")
    merge.set_defaults(do=_merge)
    merge.add_argument("folders", nargs="+", type=Path)
    merge.add_argument("--out", type=Path, default=RESULTS, help="folder of runs.csv")
    prune = verbs.add_parser("prune", help="do the cells of one-shot pruning that have no row")
    prune.set_defaults(do=_prune)
    prune.add_argument("--models", nargs="+", metavar="MODEL", help=f"of {', '.join(oneshot.SEQUENCES)}")
    prune.add_argument("--cells", nargs="+", default=["*"], metavar="KEY", help="with wildcards: 'minilm/2:4/*', 'gpt/*/admm/held/*'")
    prune.add_argument("--again", action="store_true", help="also cells that have a row, which is replaced")
    prune.add_argument("--list", action="store_true", help="only list them")
    prune.add_argument("--out", type=Path, default=oneshot.PATH, metavar="CSV")
    one = verbs.add_parser("layers", help="seconds and memory of one-shot pruning of a square layer, by method")
    one.set_defaults(do=_layers)
    one.add_argument("--size", type=int, default=4096)
    one.add_argument("--repeats", type=int, default=3)
    one.add_argument("--methods", nargs="+", default=list(layers.METHODS), metavar="METHOD", choices=layers.METHODS)
    one.add_argument("--out", type=Path, default=layers.PATH, metavar="CSV")
    integers = verbs.add_parser("rounding", help="integers as values, with and without 2:4, in both orders")
    integers.set_defaults(do=lambda args: rounding.measure(args.models, args.out, args.methods))
    integers.add_argument("--models", nargs="+", default=["smollm2", "minilm"])
    integers.add_argument("--methods", nargs="+", metavar="METHOD", help="of nm.prune_, default all and the dense model")
    integers.add_argument("--out", type=Path, default=rounding.PATH, metavar="CSV")
    heads = verbs.add_parser("embeddings", help="integers for the embedding and the output head of SmolLM2")
    heads.set_defaults(do=lambda args: rounding.measure_embeddings())
    why = verbs.add_parser("short", help="training loss and masks of short runs of gpt, those of the matrix once more")
    why.set_defaults(do=lambda args: short.measure())
    report = verbs.add_parser("report", help="write the pages")
    report.set_defaults(do=_report)
    report.add_argument("--check", action="store_true", help="write nothing, exit 1 if the pages do not agree with the rows")
    return parser


DEFAULT = next(iter(studies.STUDIES))


def _merge(args: argparse.Namespace) -> int:
    for folder in args.folders:
        for name in (RUNS, AGAIN):
            if more := rows.load(folder, name):
                rows.append(more, args.out, name)
                rows.tidy(args.out, name)
                print(f"{folder / name}: {len(more)} runs")
    return 0


def _prune(args: argparse.Namespace) -> int:
    machine_rows.commit()  # cached now, since the tree may change before the last row is written
    done = set() if args.again else {row.key for row in oneshot.load(args.out)}
    chosen = {cell.key: cell for cell in oneshot.plan() if not args.models or cell.model in args.models}
    todo = [cell for key, cell in chosen.items() if key not in done and any(fnmatch(key, pattern) for pattern in args.cells)]
    for number, cell in enumerate(todo, 1):
        if args.list:
            print(cell.key)
            continue
        row = oneshot.run(cell)
        oneshot.append(row, args.out)
        values = {name: getattr(row, name) for name in ("loss", "accuracy", "cosine", "error")}
        shown = ", ".join(f"{name} {value:.4f}" for name, value in values.items() if value == value)
        print(f"[{number}/{len(todo)}] {cell.key}: {shown}; {row.pruning:.0f} s pruning, {row.seconds:.0f} s", flush=True)
    return 0


def _layers(args: argparse.Namespace) -> int:
    for name in args.methods:
        measured = layers.measure(name, args.size, args.repeats)
        machine_rows.append(measured, args.out)
        print(f"{name} {args.size}×{args.size}: " + ", ".join(f"{r.metric} {r.p50:g}" for r in measured), flush=True)
    return 0


def _report(args: argparse.Namespace) -> int:
    from . import page

    if args.check:
        found = page.problems()
        print("\n".join(found) or "every number of the pages agrees with the rows")
        return max(int(bool(found)), oneshot_page.write(check=True))
    for path in page.write():
        print(path)
    return oneshot_page.write(check=False)


def _enter(args: argparse.Namespace) -> str:
    """Settle the folder, and with a recipe file what is run; returns the name of its recipe, or an empty text.

    Raises:
        ValueError: the recipe file or the folder cannot be used.
    """
    if args.recipe_file is None:
        args.out = args.out or RESULTS
        return ""
    name, args.out = leaderboard.enter(args.recipe_file, args.out)
    args.methods = [*args.methods, name]
    if not args.studies:
        args.tasks = args.tasks or list(leaderboard.TASKS)
    return name


def _cases(args: argparse.Namespace) -> dict[str, list[Case]]:
    """Task -> cases of the chosen studies."""
    found: dict[str, list[Case]] = {}
    for name in args.studies or [DEFAULT]:
        study = find("study", name, studies.STUDIES).only(args.methods, args.tasks, args.patterns)
        for method in set(study.methods) - methods.VARIANTS.keys():
            methods.get(method)
        for task in study.tasks:
            found.setdefault(task, []).extend(studies.cases(study, task))
    return {task: list(dict.fromkeys(cases)) for task, cases in found.items()}


def _run(args: argparse.Namespace) -> int:
    place = Place(args.device, args.bf16, args.parallel).enter()
    try:
        return _run_at(place, args)
    finally:
        place.leave()


def _run_at(place: Place, args: argparse.Namespace) -> int:
    name, failed = _enter(args), 0
    if name and place.first:
        leaderboard.keep(args.recipe_file, args.out)
    if args.again:
        with runner.processes(args.workers) as pool:
            return int(bool(runner.run_all(map(RunSpec.from_key, args.again), args.out, pool, args.workers, AGAIN)))
    found = _cases(args)
    for task in set(found) & set(data.SOURCES):
        data.files(task)  # report a missing download once, before anything runs
    for cases in found.values():
        if place == Place():
            with runner.processes(args.workers) as pool:
                failed += runner.run_cases(cases, args.out, pool, args.workers, seeds=args.seeds)
        else:
            failed += runner.run_cases(cases, args.out, None, seeds=args.seeds, place=place)
    if place.first and failed:
        runner.say(f"{failed} runs failed; the same command tries them again")
    if place.first and name:
        print(leaderboard.table(name, [case for cases in found.values() for case in cases], args.out))
        print(f"\nThe rows are in {args.out / RUNS}.")
    return int(bool(failed))


def _status(args: argparse.Namespace) -> int:
    _enter(args)
    results, total = Results(rows.load(args.out)), 0.0
    for task, cases in _cases(args).items():
        left = studies.hours_left(cases, results)
        total += left
        print(f"{task}: about {left:.1f} CPU-hours left")
        for case in cases:
            known = studies.resolve(case, results)
            if known is None:
                print(f"  {case.method:20} {case.pattern:5} {case.optimizer:5} {case.beta2:<6g} setting not chosen yet")
                continue
            search = results.search(known)
            state = "searching" if search.todo else "closed" if search.closed else "open"
            e = estimate(row.val_loss for row in results.best(known).values())
            print(f"  {known.method:20} {case.pattern:5} {case.optimizer:5} {case.beta2:<6g} {state:9} {search.good} {e.shown(4)} n={e.n}")
    print(f"about {total:.1f} CPU-hours left")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
