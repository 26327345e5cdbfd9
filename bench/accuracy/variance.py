"""Does Adam's second moment under masks differ from that in dense training? ``python -m bench.accuracy.variance``.

STEP claims that it does, and that it is worse. A dense and a sparse model start from the same weights and see the same batches; at some
steps their second moments are compared weight by weight, separately for weights that the mask keeps and prunes at that step. A second dense
model with other batches shows how much two good estimates differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import nmkernels as nm

from .. import rows
from . import methods, tables, tasks
from .rows import RESULTS
from .spec import DENSE, EVALUATION_SEEDS, RunSpec
from .worker import learning_rate, make_optimizer, train_step

FILE = "variance.csv"
COLUMNS = ("task", "method", "pattern", "beta2", "seed", "step", "part", "log2_ratio", "spread", "correlation")
"""``log2_ratio`` and ``spread``: mean and standard deviation over weights of log₂(v / v of dense training); ``correlation``: that of the
two logarithms. ``part``: ``kept`` or ``pruned`` by the magnitude mask of the sparse run, ``all`` for the second dense run."""

FIGURES = COLUMNS[-3:]

SHARES = (0.1, 0.25, 0.5, 1.0)
"""Times of comparison, as shares of the run."""

OTHER_BATCHES = 1000
"""Added to the seed of the second dense run's batches."""

Moments = dict[int, tuple[list[Tensor], list[Tensor]]]
"""Step -> second moments and masks of the maskable weights."""


def moments(run: RunSpec, like: str, batches: int | None = None) -> Moments:
    """Train, and record the moments at ``SHARES``; the masks are the magnitude masks of ``like``.

    Args:
        batches: the seed of the batches; the run's by default.
    """
    it = tasks.get(run.task)
    torch.manual_seed(run.seed)
    model, recipe = it.model(), methods.get(run.method).build(run.pattern, run.steps)
    handle = nm.sparsify_(model, recipe)
    optimizer = handle.attach(make_optimizer(run, it.settings, recipe, model))
    wanted, found = {round(share * run.steps) for share in SHARES}, {}
    for step in range(1, run.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(it.settings, run.lr, step, run.steps)
        train_step(it, model, optimizer, run.seed if batches is None else batches, step)
        if step in wanted:
            layers = handle.layers.values()
            v = [optimizer.state[layer.weight]["exp_avg_sq"].clone() for layer in layers]
            found[step] = v, [nm.ops.mask(layer.master.detach(), like) for layer in layers]
    return found


def compare(ours: Moments, dense: Moments, split: bool) -> Iterator[tuple[int, str, float, float, float]]:
    """(step, part, mean and deviation of the log₂ ratio, correlation of the logarithms), without weights that had no gradient yet."""
    for step, (v, masks) in ours.items():
        a, b = (torch.cat([t.flatten() for t in tensors]).double() for tensors in (v, dense[step][0]))
        mask = torch.cat([m.flatten() for m in masks])
        used = (a > 0) & (b > 0)
        for part, where in (("kept", mask), ("pruned", ~mask)) if split else (("all", torch.ones_like(mask)),):
            x, y = a[where & used].log2(), b[where & used].log2()
            yield step, part, (x - y).mean().item(), (x - y).std().item(), torch.corrcoef(torch.stack([x, y]))[0, 1].item()


def main(argv: Sequence[str] | None = None, tell: Callable[[str], None] = print) -> int:
    """Write ``variance.csv``, rows of all seeds and patterns."""
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy.variance", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=["gpt", "vit"])
    parser.add_argument("--methods", nargs="+", default=["srste", "mdgf-kao"])
    parser.add_argument("--patterns", nargs="+", default=["2:4", "1:8", "1:16"])
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="instead of the task's own")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    lines: list[dict[str, str]] = []
    for task in args.tasks:
        s = tasks.base.settings(task)
        for seed in EVALUATION_SEEDS[: args.seeds]:
            base = RunSpec(task, DENSE, DENSE, seed, s.lr, args.steps or s.steps, "adamw", args.beta2)
            dense = moments(base, args.patterns[0])
            runs = [(m, p, moments(replace(base, method=m, pattern=p), p)) for m in args.methods for p in args.patterns]
            runs.append((DENSE, DENSE, moments(base, args.patterns[0], seed + OTHER_BATCHES)))
            for method, pattern, ours in runs:
                for step, part, *figures in compare(ours, dense, method != DENSE):
                    key = (task, method, pattern, f"{args.beta2:g}", str(seed), str(step), part)
                    lines.append(dict(zip(COLUMNS, (*key, *(f"{x:.4g}" for x in figures)), strict=True)))
            tell(f"{task} seed {seed} done")
    rows.save(lines, COLUMNS, args.out / FILE)
    return 0


def load(folder: Path = RESULTS) -> list[dict[str, str]]:
    """The rows of ``variance.csv``; empty if there is no file."""
    return rows.load(folder / FILE)


def summary(lines: Sequence[dict[str, str]], task: str) -> str:
    """Means over the seeds, at the last step of the runs and at half of it."""
    mine = [line for line in lines if line["task"] == task]
    last = max((int(line["step"]) for line in mine), default=0)
    body = []
    for method, pattern, part in dict.fromkeys((line["method"], line["pattern"], line["part"]) for line in mine):
        cells = [f"`{method}`" if method != DENSE else "dense, other batches", pattern, part]
        for step in (last // 2, last):
            found = [x for x in mine if (x["method"], x["pattern"], x["part"], x["step"]) == (method, pattern, part, str(step))]
            cells += [f"{sum(float(x[c]) for x in found) / len(found):+.2f}" if found else "–" for c in FIGURES]
        body.append(cells)
    figures = [f"{name}, step {step}" for step in (last // 2, last) for name in ("log₂ ratio", "spread", "correlation")]
    return tables.table([["run", "pattern", "weights", *figures], *body])


if __name__ == "__main__":
    raise SystemExit(main())
