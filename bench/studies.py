"""Do the sparse kernels train like the reference? ``python -m bench.studies`` compares loss curves.

Three runs per recipe with the same initial weights and batches: with the packed kernels of this machine (``packed=True``), with the
reference (``NMKERNELS_BACKEND=reference``, ``packed=False``), and with the reference and learning rates 1e-6 larger, which shows how far
apart rounding alone drives two runs. On a GPU under bfloat16 autocast, on a CPU in float32. Rows are written to ``bench/results``, or to
``--out``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

import nmkernels as nm
from examples.train_gpt.data import Corpus, load_corpus
from examples.train_gpt.model import GPT, GPTConfig

from .cases._ours import forced
from .rows import RESULTS, Row, append, commit, row

RECIPES = {
    "srste": "srste:2:4(decay=2e-4)",
    "sste": "sste:2:4(seed=1)",
    "fst": "fst:2:4(every=40, end=None, seed=1)",
}
PACKED, REFERENCE, NUDGED = "packed kernels", "reference arithmetic", "reference arithmetic, nudged"
TAIL = 20
LATE = f"training loss, mean of the last {TAIL} steps, nats per byte"
APART, FARTHEST = "distance of the loss from reference arithmetic's, per step", "largest distance of the loss from reference arithmetic's"
NUDGE = 1e-6
SIZES = {"batch": 8, "context": 64, "width": 128, "layers": 2, "heads": 4}


def arithmetic(provider: str) -> AbstractContextManager[None]:
    """Inside, operations run on the backend of ``provider``."""
    return nullcontext() if provider == PACKED else forced("reference")


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


def loss_curves(args: argparse.Namespace) -> Iterator[list[Row]]:
    """Every recipe with each provider, and the distances between the curves."""
    corpus = load_corpus(args.data)
    for name in args.recipes:
        curves = {provider: curve(RECIPES[name], provider, corpus, args) for provider in (PACKED, REFERENCE, NUDGED)}
        new = rows_of_curves(name, curves, args)
        farthest = ", ".join(f"{r.provider.split(', ', 1)[1]} {r.p50:.2g}" for r in new if r.metric == FARTHEST)
        ends = ", ".join(f"{provider} {losses[-1]:.4f}" for provider, losses in curves.items())
        print(f"{name}: last loss {ends}; farthest from reference: {farthest}")
        yield new


def rows_of_curves(name: str, curves: dict[str, list[float]], args: argparse.Namespace) -> list[Row]:
    """Rows for the curves of one recipe."""
    shape = f"byte GPT {args.width}x{args.layers}, {args.batch * args.context} tokens, {args.steps} steps"
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    about = {"pattern": "2:4", "dtype": dtype, "shape": shape, "device": args.device}
    found = []
    for provider, losses in curves.items():
        who = f"{name}, {provider}"
        found.append(row("loss_curve", who, LATE, [sum(losses[-TAIL:]) / len(losses[-TAIL:])], **about))
        if provider != REFERENCE:
            apart = [abs(a - b) for a, b in zip(losses, curves[REFERENCE], strict=True)]
            found += [row("loss_curve", who, APART, apart, **about), row("loss_curve", who, FARTHEST, [max(apart)], **about)]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Train and write rows as they come."""
    parser = argparse.ArgumentParser(prog="python -m bench.studies", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "loss_curves.csv", metavar="CSV", help="file to add rows to")
    for option, default in {"steps": 200, **SIZES}.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--recipes", nargs="+", metavar="NAME", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--data", help="a text file or a folder of them; default: the standard library's source")
    args = parser.parse_args(argv)
    commit()  # cached now, since the tree may change before the last row is written
    for rows in loss_curves(args):
        append(rows, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
