"""Is Adam's second moment under masks another than in dense training? ``python -m bench.accuracy.variance``.

STEP starts from the claim that it is, and a poor one. Two models begin alike and see the same batches, one dense and one sparse; at
some steps their second moments are compared weight by weight, apart for weights that the mask keeps and prunes at that step. A second dense
model with other batches shows how much two good estimates differ anyway.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

import nmkernels as nm

from .. import rows
from . import methods, tables, tasks
from .plan import PATTERNS
from .rows import RESULTS
from .spec import DENSE, EVALUATION_SEEDS
from .worker import learning_rate, param_groups, train_step

FILE = "variance.csv"
COLUMNS = ("task", "method", "pattern", "seed", "step", "part", "log2_ratio", "spread", "correlation")
"""``log2_ratio`` and ``spread``: mean and standard deviation over weights of log₂(v / v of dense training); ``correlation``: that of the
two logarithms. ``part``: ``kept`` or ``pruned`` by the magnitude mask of the sparse run, ``all`` for the second dense run."""

SHARES = (0.1, 0.25, 0.5, 1.0)
"""When the moments are compared, as shares of the run."""

OTHER_BATCHES = 1000
"""Added to the seed of the second dense run's batches."""

Moments = dict[int, tuple[list[Tensor], list[Tensor]]]
"""Step -> second moments and masks of the maskable weights."""


def moments(task: str, method: str, pattern: str, seed: int, steps: int, batches: int, like: str) -> Moments:
    """Train, and take note at ``SHARES``; the masks are the magnitude masks of ``like``."""
    it = tasks.get(task)
    torch.manual_seed(seed)
    model, recipe = it.model(), methods.get(method).build(pattern, steps)
    handle = nm.sparsify_(model, recipe)
    s = it.settings
    optimizer = handle.attach(recipe.optimizer(param_groups(model), lr=s.lr, betas=s.betas, weight_decay=s.weight_decay))
    wanted, found = {round(share * steps) for share in SHARES}, {}
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(s, s.lr, step, steps)
        train_step(it, model, optimizer, batches, step)
        if step in wanted:
            layers = handle.layers.values()
            v = [optimizer.state[layer.weight]["exp_avg_sq"].clone() for layer in layers]
            found[step] = v, [nm.ops.mask(layer.master.detach(), like) for layer in layers]
    return found


def compare(ours: Moments, dense: Moments, split: bool) -> Iterator[tuple[int, str, float, float, float]]:
    """(step, part, mean and deviation of log₂ of the ratio, correlation of the logarithms); weights without a gradient yet are left out."""
    for step, (v, masks) in ours.items():
        a, b = (torch.cat([t.flatten() for t in tensors]).double() for tensors in (v, dense[step][0]))
        kept = torch.cat([m.flatten() for m in masks])
        used = (a > 0) & (b > 0)
        for part, where in (("kept", kept), ("pruned", ~kept)) if split else (("all", torch.ones_like(kept)),):
            x, y = a[where & used].log2(), b[where & used].log2()
            yield step, part, (x - y).mean().item(), (x - y).std().item(), torch.corrcoef(torch.stack([x, y]))[0, 1].item()


def main(argv: Sequence[str] | None = None, tell: Callable[[str], None] = print) -> int:
    """Write ``variance.csv``, rows of all seeds and patterns."""
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy.variance", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=["gpt", "vit"])
    parser.add_argument("--methods", nargs="+", default=["srste", "mdgf"])
    parser.add_argument("--patterns", nargs="+", default=list(PATTERNS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="instead of the task's own")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    lines: list[dict[str, str]] = []
    for task in args.tasks:
        steps = args.steps or tasks.base.settings(task).steps
        for seed in EVALUATION_SEEDS[: args.seeds]:
            dense = moments(task, DENSE, DENSE, seed, steps, seed, args.patterns[0])
            runs = [(m, p, moments(task, m, p, seed, steps, seed, p)) for m in args.methods for p in args.patterns]
            runs.append((DENSE, DENSE, moments(task, DENSE, DENSE, seed, steps, seed + OTHER_BATCHES, args.patterns[0])))
            for method, pattern, ours in runs:
                for step, part, *figures in compare(ours, dense, method != DENSE):
                    key = (task, method, pattern, str(seed), str(step), part)
                    lines.append(dict(zip(COLUMNS, (*key, *(f"{x:.4g}" for x in figures)), strict=True)))
            tell(f"{task} seed {seed} done")
    rows.save(lines, COLUMNS, args.out / FILE)
    return 0


def load(folder: Path = RESULTS) -> list[dict[str, str]]:
    """The rows of ``variance.csv``; none where there is no file."""
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
            cells += [f"{sum(float(x[c]) for x in found) / len(found):+.2f}" if found else "–" for c in COLUMNS[6:]]
        body.append(cells)
    figures = [f"{name}, step {step}" for step in (last // 2, last) for name in ("log₂ ratio", "spread", "correlation")]
    return tables.table([["run", "pattern", "weights", *figures], *body])


if __name__ == "__main__":
    raise SystemExit(main())
