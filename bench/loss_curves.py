"""Do the sparse kernels train as reference arithmetic does? Loss curves of both, step by step, on the byte-level GPT.

``python -m bench.loss_curves`` trains the same first weights on the same batches three times per recipe: with the packed kernels of this
machine (``packed=True``), with every operation by its definition in plain torch (``NMKERNELS_BACKEND=reference``, ``packed=False``), and
by definition once more with learning rates 1e-6 larger, which tells how far rounding alone drives a run. On a GPU under bfloat16
autocast, on a CPU in float32. Rows go to ``bench/results/loss_curves.csv``, or to ``--out``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import nmkernels as nm
from nmkernels.dispatch import ENV
from nmkernels.models import GPT, Corpus, GPTConfig, load_corpus

from .rows import RESULTS, Row, append, commit, row

RECIPES = {
    "srste": "srste:2:4(decay=2e-4)",
    "sste": "sste:2:4(seed=1)",
    "fst": "fst:2:4(refresh=40, fine_tune=0, seed=1)",
}
PACKED, REFERENCE, NUDGED = "packed kernels", "reference arithmetic", "reference arithmetic, nudged"
TAIL = 20
LATE = f"training loss, mean of the last {TAIL} steps, nats per byte"
APART, FARTHEST = "distance of the loss from reference arithmetic's, per step", "largest distance of the loss from reference arithmetic's"
NUDGE = 1e-6


@contextmanager
def arithmetic(provider: str) -> Iterator[None]:
    """Inside, operations run as ``provider`` says."""
    before = os.environ.get(ENV)
    try:
        if provider != PACKED:
            os.environ[ENV] = "reference"
        yield
    finally:
        os.environ.pop(ENV, None)
        if before is not None:
            os.environ[ENV] = before


def curve(recipe: str, provider: str, corpus: Corpus, args: argparse.Namespace) -> list[float]:
    """The training loss of each step."""
    config = GPTConfig(width=args.width, layers=args.layers, heads=args.heads, context=args.context)
    with arithmetic(provider):
        torch.manual_seed(0)
        model = GPT(config).to(args.device)
        spec = nm.recipes.get(recipe, packed=provider == PACKED)
        handle = nm.sparsify_(model, spec)
        optimizer = handle.attach(spec.optimizer(model.parameters(), lr=args.lr * (1 + NUDGE * (provider == NUDGED))))
        losses = []
        for step in range(args.steps):
            x, y = (part.to(args.device) for part in corpus.batch(0, step, args.batch, args.context))
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=args.device == "cuda"):
                loss = model.loss(x, y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return torch.stack(losses).float().tolist()


def rows(name: str, curves: dict[str, list[float]], args: argparse.Namespace) -> list[Row]:
    """Rows for the curves of one recipe."""
    shape = f"byte GPT {args.width}x{args.layers}, {args.batch * args.context} tokens, {args.steps} steps"
    same: dict[str, Any] = {
        "pattern": "2:4", "dtype": "bfloat16" if args.device == "cuda" else "float32", "shape": shape, "device": args.device,
    }  # fmt: skip
    found = []
    for provider, losses in curves.items():
        who = f"{name}, {provider}"
        found.append(row("loss_curve", who, LATE, [sum(losses[-TAIL:]) / len(losses[-TAIL:])], **same))
        if provider != REFERENCE:
            apart = [abs(a - b) for a, b in zip(losses, curves[REFERENCE], strict=True)]
            found += [row("loss_curve", who, APART, apart, **same), row("loss_curve", who, FARTHEST, [max(apart)], **same)]
    return found


def main(argv: list[str] | None = None, path: Path = RESULTS / "loss_curves.csv") -> int:
    """Train every recipe in each arithmetic, write the rows, and print how far the curves are apart."""
    parser = argparse.ArgumentParser(prog="python -m bench.loss_curves", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    sizes = {"steps": 200, "batch": 8, "context": 64, "width": 128, "layers": 2, "heads": 4}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--data", default=None, help="a text file or a folder of them; the standard library's source if left out")
    parser.add_argument("--out", type=Path, default=path, metavar="CSV", help="file to add rows to")
    args = parser.parse_args(argv)
    commit()  # what the tree is now, not what it may have become when the last row is written
    corpus = load_corpus(args.data)
    for name in args.recipes:
        curves = {provider: curve(RECIPES[name], provider, corpus, args) for provider in (PACKED, REFERENCE, NUDGED)}
        new = rows(name, curves, args)
        append(new, args.out)
        farthest = {r.provider.split(", ", 1)[1]: r.p50 for r in new if r.metric == FARTHEST}
        ends = ", ".join(f"{provider} {losses[-1]:.4f}" for provider, losses in curves.items())
        print(f"{name}: last loss {ends}; farthest from reference: {', '.join(f'{k} {v:.2g}' for k, v in farthest.items())}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
