"""Three studies with small training runs: ``python -m bench.studies step_clamp | step_vs_dense | loss_curves``.

* ``step_clamp``: does STEP need its clamp? Test accuracy of a 64-128-128-10 MLP whose training set it can fit, so that gradients vanish
  in phase 0, which is where a frozen second moment is known to fail.
* ``step_vs_dense``: how far is a sparse model from its dense baseline? Validation loss of both over seeds, by
  ``examples/train_gpt/train.py --steps 800 --baseline``: same first weights, same batches, the baseline on plain PyTorch.
* ``loss_curves``: do the sparse kernels train like the reference? Three runs per recipe with the same initial weights and batches: with
  the packed kernels of this machine (``packed=True``), with the reference (``NMKERNELS_BACKEND=reference``, ``packed=False``), and with the
  reference and learning rates 1e-6 larger, which shows how far apart rounding alone drives two runs. On a GPU under bfloat16 autocast, on
  a CPU in float32.

Rows are written to ``bench/results``, or to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nmkernels as nm
from examples.train_gpt.data import Corpus, load_corpus
from examples.train_gpt.model import GPT, GPTConfig
from nmkernels.recipes.registry import parse

from .cases._ours import forced
from .rows import RESULTS, Row, append, commit, row

# ---- step_clamp

STEPS, BATCH = 2000, 128
PATTERNS = ("2:4", "1:16", "1:32")
CLAMPS = (None, 2.0)


def clusters(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten classes of four clusters in 64 features, many of them rarely active, like pixels: 1200 training and 1000 test points."""
    gen = torch.Generator().manual_seed(seed)
    centres = torch.randn(40, 64, generator=gen)
    threshold = 3 * torch.rand(64, generator=gen) - 1
    which = torch.randint(40, (2200,), generator=gen)
    x = (centres[which] + 0.8 * torch.randn(2200, 64, generator=gen) - threshold).relu()
    y = which % 10
    return x[:1200], y[:1200], x[1200:], y[1200:]


def classify(recipe: nm.recipes.Recipe, seed: int, steps: int) -> float:
    """Test accuracy, in percent, of the weights that ``finish()`` would leave; 10 (chance) if training became NaN."""
    x, y, test_x, test_y = clusters(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    handle = nm.sparsify_(model, recipe, filter_fn=lambda m, name: name != "4")
    # one β₂ for all: STEP's own optimizer would have another one than SR-STE's
    optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    gen = torch.Generator().manual_seed(seed + 1)
    for _ in range(steps):
        batch = torch.randint(len(x), (BATCH,), generator=gen)
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        schedule.step()
    with handle.deployable(), torch.no_grad():
        return 100 * float((model(test_x).argmax(-1) == test_y).float().mean())


def step_clamp(args: argparse.Namespace) -> Iterator[list[Row]]:
    """SR-STE, and STEP with and without its clamp, by pattern."""
    torch.set_num_threads(1)
    providers: dict[str, dict[str, Any]] = {"srste": {}}
    providers |= {f"step 25% clamp={c}": {"switch": "fixed", "clamp": c} for c in CLAMPS}
    providers |= {f"step auto clamp={c}": {"switch": "paper", "t_min": 0.1, "clamp": c} for c in CLAMPS}
    for pattern in PATTERNS:
        for name, config in providers.items():
            recipe = nm.recipes.get(name.split()[0], pattern=pattern, total_steps=args.steps, **config)
            scores = [classify(recipe, seed, args.steps) for seed in range(args.seeds)]
            print(f"{pattern} {name}: median {sorted(scores)[len(scores) // 2]:.1f} worst {min(scores):.1f}")
            about = {"pattern": pattern, "dtype": "float32", "shape": f"mlp 64-128-128-10, {args.steps} steps, {args.seeds} seeds"}
            whats = {"test accuracy %": scores, "worst seed's test accuracy %": [min(scores)]}
            yield [row("train", name, what, values, **about) for what, values in whats.items()]


# ---- step_vs_dense

PROGRAM = Path(__file__).resolve().parents[1] / "examples/train_gpt/train.py"
LOSS, RATIO, WORST = (
    "validation loss, nats per byte",
    "validation loss over the dense baseline's",
    "worst seed's validation loss over its dense baseline's",
)
BYTES = "compressed bytes over dense, sparse layers"


def step_vs_dense(args: argparse.Namespace) -> Iterator[list[Row]]:
    """Every recipe over the seeds, each run in its own process and folder; progress goes to standard error."""
    for recipe in args.recipes or ["step:2:4"]:
        results = []
        for seed in range(args.seeds):
            words = ["--steps", "800", "--baseline", "--recipe", recipe, "--seed", str(seed), *args.more]
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, str(PROGRAM), *words, "--out", str(Path(folder, "out"))]
                subprocess.run(command, stdout=sys.stderr, check=True)
                results.append(json.loads(Path(folder, "out", "result.json").read_text()))
        print(f"{recipe}: " + ", ".join(f"{r['val_loss_ratio']:.4f}" for r in results))
        yield rows_of_runs(results)


def rows_of_runs(results: list[dict[str, Any]]) -> list[Row]:
    """Rows for the runs of one recipe over seeds."""
    config = results[0]["config"]
    name, pattern, _ = parse(config["recipe"])
    about = {
        "pattern": pattern or "",
        "dtype": "float32",
        "shape": f"byte GPT {config['width']}x{config['layers']}, {config['steps']} steps, {len(results)} seeds",
    }
    ratios = [r["val_loss_ratio"] for r in results]
    sizes = [r["sparse"]["bytes"]["layers_compressed"] / r["sparse"]["bytes"]["layers_dense"] for r in results]
    found = [row("train", "dense baseline", LOSS, [r["baseline"]["val_loss"] for r in results], **about)]
    whats = {LOSS: [r["sparse"]["val_loss"] for r in results], RATIO: ratios, WORST: [max(ratios)], BYTES: sizes}
    return found + [row("train", name, what, values, **about) for what, values in whats.items()]


# ---- loss_curves

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
    for name in args.recipes or RECIPES:
        if name not in RECIPES:
            raise SystemExit(f"python -m bench.studies loss_curves: error: no curves of {name!r}; there are {', '.join(RECIPES)}.")
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


# ---- the command

Study = Callable[[argparse.Namespace], Iterator[list[Row]]]
STUDIES: dict[str, tuple[Study, str, dict[str, int]]] = {
    "step_clamp": (step_clamp, "step_clamp.csv", {"seeds": 8, "steps": STEPS}),
    "step_vs_dense": (step_vs_dense, "accuracy.csv", {"seeds": 3}),
    "loss_curves": (loss_curves, "loss_curves.csv", {"steps": 200, **SIZES}),
}
"""A study: its function, the file of its rows, and its numeric options with defaults."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a study and write its rows as they come; ``step_vs_dense`` passes unknown options to ``train.py``."""
    parser = argparse.ArgumentParser(prog="python -m bench.studies", description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="study", required=True)
    for name, (_, file, numbers) in STUDIES.items():
        p = verbs.add_parser(name)
        p.add_argument("--out", type=Path, default=RESULTS / file, metavar="CSV", help="file to add rows to")
        for option, default in numbers.items():
            p.add_argument(f"--{option}", type=int, default=default)
        if name != "step_clamp":
            p.add_argument("--recipes", nargs="+", metavar="NAME")
        if name == "loss_curves":
            p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
            p.add_argument("--lr", type=float, default=1e-3)
            p.add_argument("--data", help="a text file or a folder of them; default: the standard library's source")
    args, more = parser.parse_known_args(argv)
    args.more = more
    if more and args.study != "step_vs_dense":
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    commit()  # cached now, since the tree may change before the last row is written
    for rows in STUDIES[args.study][0](args):
        append(rows, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
