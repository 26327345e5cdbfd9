"""Train a small sparse GPT on text, compress it, and check that the file is the same model.

python examples/train_gpt/train.py --demo                                      # what make demo runs
python examples/train_gpt/train.py --recipe "step:2:4(t_max=0.5)" --data texts --out runs/step --baseline
torchrun --nproc-per-node 2 examples/train_gpt/train.py --parallel fsdp --out runs/fsdp

The same command again, also with another --parallel, continues after the last checkpoint.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import platform
import shutil
import statistics
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import nmkernels as nm
import report
from data import Corpus, load_corpus
from model import GPT, GPTConfig, generate
from parallel import KINDS, Ranks, load, save

RECIPE = "srste:2:4(decay=2.0)"
"""λ is the best one of the task ``gpt`` in ``bench/accuracy``, a byte-level GPT with AdamW as here."""

DEMO = {"steps": 800, "batch": 4, "width": 256, "layers": 2, "lr": 1e-3, "baseline": True, "out": Path("demo_out")}
"""Wide enough that 2:4 speeds up generation, and short: under two minutes on two cores."""

SETTINGS = ("recipe", "steps", "batch", "context", "width", "layers", "heads", "activation", "lr", "seed")
"""The options that determine the numbers of a run."""

WARMUP, WEIGHT_DECAY, CLIP = 0.05, 0.1, 1.0
BETAS = (0.9, 0.99)
"""β₂ is not Adam's usual 0.999, which averages over 1/(1−β₂) = 1000 steps, longer than many runs here."""

EVALS, VAL_WINDOWS = 10, 256
"""Validations during training, each of a quarter of the windows of that at the end."""

PROMPT = b"def "
SPEED_TOKENS, SPEED_ROUNDS, SAMPLE_TOKENS = 64, 15, 320


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--recipe", default=RECIPE, metavar="NAME:N:M", help='default "%(default)s"; python -m nmkernels recipes lists them')
    add("--data", metavar="FILE_OR_FOLDER", help="text to train on; default: the source of the Python standard library")
    add("--demo", action="store_true", help="the settings of make demo, with --baseline: under two minutes on two cores")
    add("--baseline", action="store_true", help="also train the dense baseline on the same batches, and compare")
    add("--steps", type=int, default=2000)
    add("--batch", type=int, default=16, help="sequences per step, default 16")
    add("--context", type=int, default=128, help="bytes per sequence, default 128")
    add("--width", type=int, default=128, help="features of the model, default 128")
    add("--layers", type=int, default=4, help="transformer blocks, default 4")
    add("--heads", type=int, default=4, help="attention heads, default 4; divides the width")
    add("--activation", metavar="NAME", help="gelu, relu2 or relu2:N:M; default gelu, for the recipe act24 relu2")
    add("--lr", type=float, default=2e-3, help="peak learning rate, default 2e-3")
    add("--seed", type=int, default=0, help="of the weights and the batches")
    add("--out", type=Path, default=Path("runs/train"), help="folder for all results; default runs/train, demo_out with --demo")
    add("--overwrite", action="store_true", help="replace the run in --out")
    add("--checkpoint-every", type=int, default=100, metavar="STEPS")
    add("--log-every", type=int, default=20, metavar="STEPS")
    add("--threads", type=int, help="threads of PyTorch; default: PyTorch's choice")
    add("--device", default="cpu", help="default cpu; with --parallel, cuda means one GPU per process")
    add("--parallel", choices=KINDS, default="none", help="how the processes that torchrun started share the work")
    args = parser.parse_args(words)
    if args.demo:
        parser.set_defaults(**DEMO)
        args = parser.parse_args(words)
    if ("RANK" in os.environ) != (args.parallel != "none"):
        parser.error(
            "--parallel ddp, fsdp or tp goes with torchrun: torchrun --nproc-per-node 2 examples/train_gpt/train.py --parallel fsdp"
        )
    if args.activation is None:
        args.activation = "relu2" if isinstance(recipe_of(args), nm.recipes.Activation24) else "gelu"
    return args


def recipe_of(args: argparse.Namespace) -> nm.recipes.Recipe:
    return nm.recipes.get(args.recipe, total_steps=args.steps)


def learning_rate(args: argparse.Namespace, step: int) -> float:
    """The learning rate of ``step`` (from 1): linear warm-up, then a cosine from ``lr`` to ``lr``/10."""
    warmup = max(1, round(WARMUP * args.steps))
    if step <= warmup:
        return args.lr * step / warmup
    progress = (step - warmup) / max(1, args.steps - warmup)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


class Trainer:
    """A GPT with its optimizer: sparse under ``recipe``, or the dense baseline in plain PyTorch if ``recipe`` is None.

    Both start from the same weights and read the same batches, of which each rank reads its share.
    """

    def __init__(self, args: argparse.Namespace, corpus: Corpus, recipe: nm.recipes.Recipe | None, ranks: Ranks) -> None:
        self.args, self.corpus, self.ranks = args, corpus, ranks
        torch.manual_seed(args.seed)
        self.config = GPTConfig(width=args.width, layers=args.layers, heads=args.heads, context=args.context, activation=args.activation)
        self.model = GPT(self.config).to(ranks.device)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        # before sharding and the optimizer: a recipe may add parameters
        self.handle = None if recipe is None else nm.sparsify_(self.model, recipe)
        self.shared = ranks.share(self.model)
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        vectors = [p for p in self.model.parameters() if p.dim() != 2]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        settings: dict[str, Any] = {"lr": args.lr, "betas": BETAS, "weight_decay": WEIGHT_DECAY}
        if recipe is None or self.handle is None:
            fused = ranks.kind != "tp"  # one fused call cannot take sharded and plain tensors together
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, fused=fused, foreach=False, **settings)
        else:
            self.optimizer = self.handle.attach(recipe.optimizer(groups, **settings))
        # a recipe may scale the learning rate of some groups
        self.lr_factors = [group["lr"] / args.lr for group in self.optimizer.param_groups]

    def step(self, step: int) -> float:
        """One optimizer step; returns the training loss in nats per byte."""
        for group, factor in zip(self.optimizer.param_groups, self.lr_factors, strict=True):
            group["lr"] = learning_rate(self.args, step) * factor
        x, y = map(self.ranks.rows, self.corpus.batch(self.args.seed, step, self.args.batch, self.args.context))
        loss = GPT.loss(self.shared, x, y)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.ranks.clip_gradients(self.model, CLIP)
        self.optimizer.step()
        mean = self.ranks.sum(loss.item())[0] / self.ranks.count
        if not math.isfinite(mean):
            raise nm.NMError(f"the loss is {mean} at step {step}: training has diverged. Lower --lr (it is {self.args.lr:g}).")
        return mean

    @torch.no_grad()
    def validate(self, windows: int = VAL_WINDOWS, other: GPT | None = None) -> float:
        """Mean validation loss, in nats per byte, of the weights that would be deployed now, or of another model."""
        total, count = 0.0, 0
        self.model.eval()
        with self.handle.deployable() if self.handle is not None and other is None else nullcontext():
            for batch in self.corpus.val_batches(self.args.context, self.args.batch, windows):
                x, y = map(self.ranks.rows, batch)
                loss = (other or self.model).loss(x, y).item()  # also without rows: all ranks gather sharded layers together
                total += loss * len(x) if len(x) else 0.0
                count += len(x)
        self.model.train()
        total, count = self.ranks.sum(total, count)
        return total / count

    def train(self, folder: Path, label: str) -> dict[str, Any]:
        """Run the steps after the last checkpoint in ``folder``; returns the speed, the time and the rows of the log."""
        args, ranks = self.args, self.ranks
        now = load(folder / "checkpoints", self.model, self.optimizer, ranks)
        if now is None:
            now = {"step": 0, "seconds": 0.0, "losses": [], "logged": 0.0, "rows": []}
        elif ranks.rank == 0:
            print(f"{label}: resumed after step {now['step']} of {args.steps}", flush=True)
        log = report.Log(folder / "log.csv", label, args.steps, now["rows"]) if ranks.rank == 0 else None
        for step in range(now["step"] + 1, args.steps + 1):
            begin = time.perf_counter()
            now["losses"].append(self.step(step))
            now["seconds"] += time.perf_counter() - begin
            now["step"] = step
            evaluated = step % max(1, args.steps // EVALS) == 0
            if evaluated or step % args.log_every == 0 or step == args.steps:
                losses, seconds = now["losses"], now["seconds"] - now["logged"]
                row = {"step": step, "loss": sum(losses) / len(losses), "lr": learning_rate(args, step)}
                row["tokens_per_s"] = len(losses) * args.batch * args.context / max(seconds, 1e-9)
                if evaluated:
                    row["val_loss"] = self.validate(VAL_WINDOWS // 4)
                if self.handle is not None:
                    row |= {name: value.item() for name, value in self.handle.metrics().items()}
                    row["phase"] = int(row["phase"])
                now["rows"].append(row)
                now["losses"], now["logged"] = [], now["seconds"]
                if log is not None:
                    log.row(row)
            if step % args.checkpoint_every == 0 or step == args.steps:
                save(folder / "checkpoints", self.model, self.optimizer, now, ranks)
        speed = args.steps * args.batch * args.context / max(now["seconds"], 1e-9)
        return {"train_loss": now["rows"][-1]["loss"], "train_tokens_per_s": speed, "seconds": now["seconds"], "rows": now["rows"]}

    def flops(self) -> dict[str, float]:
        """FLOPs of the whole run and of one byte of inference by ``nm.flops``, with attention scores."""
        args, state = self.args, self.handle.state
        # the T₀ that STEP chose, or the last step if it never switched; other recipes have no T₀
        switch = (state["switch_step"] or args.steps) if "switch_step" in state else None
        scores = args.layers * 2.0 * args.context * args.width  # two GEMMs, half of each behind the causal mask
        counted = nm.flops(self.model, self.handle.recipe, args.steps, tokens=args.batch * args.context, other=scores, switch_step=switch)
        return {name: getattr(counted, name) for name in ("training", "dense_training", "inference", "dense_inference")}

    def deploy(self, out: Path) -> dict[str, Any]:
        """Finish the model, write its files into ``out``, check them, and return what was measured. In one process."""
        result: dict[str, Any] = {"val_loss": self.validate()}
        model = self.model.eval()
        self.handle.finish()
        nm.save_dense(model, out / "model-dense.safetensors")
        if self.handle.recipe.final != "dense":
            dense = nm.densify_(copy.deepcopy(model))
            nm.compress_(model)
            result |= self._compressed(dense, out)
        result["sample"] = (PROMPT + generate(model, PROMPT, SAMPLE_TOKENS, temperature=0.7)).decode("utf-8", "replace")
        (out / "sample.txt").write_text(result["sample"], encoding="utf-8")
        return result

    @torch.no_grad()
    def _compressed(self, dense: GPT, out: Path) -> dict[str, Any]:
        """Save the compressed model, read it back, and compare it with ``dense`` and with rounded values."""
        model, file = self.model, out / "model.safetensors"
        nm.save_compressed(model, file)
        reloaded = nm.load_compressed(GPT(self.config).to(self.ranks.device).eval(), file)
        x, _ = next(self.corpus.val_batches(self.args.context, self.args.batch, self.args.batch))
        logits, loaded, masked = (each(x.to(self.ranks.device)) for each in (model, reloaded, dense))
        if not torch.equal(logits, loaded):
            raise nm.NMError(f"{file}: the loaded model gives other logits than the saved one; please report this.")
        layers = {name: m for name, m in model.named_modules() if isinstance(m, nm.CompressedLinear)}
        rounded = {values: nm.compress_(copy.deepcopy(model), values=values) for values in ("int8", "int4")}
        return {
            "max_difference_to_dense": (logits - masked).abs().max().item(),
            "bytes": {
                "layers_dense": sum(dense.get_parameter(f"{name}.weight").nbytes for name in layers),
                "layers_compressed": sum(m.weight.nbytes + sum(p.nbytes for p in m.adapter or ()) for m in layers.values()),
                "file_dense": (out / "model-dense.safetensors").stat().st_size,
                "file_compressed": file.stat().st_size,
            },
            "rounded": {
                values: {"layers": sum(one.get_submodule(name).weight.nbytes for name in layers), "val_loss": self.validate(other=one)}
                for values, one in rounded.items()
            },
            "tokens_per_s": speeds({"dense": dense, "compressed": model, **rounded}),
        }


def speeds(models: dict[str, GPT]) -> dict[str, float]:
    """Tokens per second of greedy generation at batch 1: medians of alternating rounds, so that load on the machine affects all models."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for i in range(SPEED_ROUNDS + 1):
        for name, model in models.items():
            begin = time.perf_counter()
            generate(model, PROMPT, SPEED_TOKENS, temperature=0)
            if i:  # the first round warms up
                times[name].append(time.perf_counter() - begin)
    return {name: SPEED_TOKENS / statistics.median(t) for name, t in times.items()}


def claim(out: Path, settings: dict[str, Any], overwrite: bool, ranks: Ranks) -> None:
    """Begin a run in ``out``, which must be new or empty; or continue the one there, if it has these settings."""
    file = out / "run.json"
    before = json.loads(file.read_text()) if file.exists() else None
    if before is None and out.exists() and (names := sorted(p.name for p in out.iterdir() if not p.name.startswith("."))):
        raise nm.NMError(f"{out} holds files of something else ({', '.join(names[:3])}); pass a new or an empty folder.")
    if before not in (None, settings) and not overwrite:
        differ = [f"{name} is {before.get(name)} there and {value} here" for name, value in settings.items() if before.get(name) != value]
        raise nm.NMError(f"{out} holds another run: {'; '.join(differ)}. Use another --out, or --overwrite to replace it.")
    ranks.barrier()  # all ranks have looked before the first one writes
    if ranks.rank == 0:
        for part in out.glob(".*.tmp"):  # a file that a killed process was writing
            shutil.rmtree(part)
    if ranks.rank == 0 and (before is None or overwrite):
        for name in ("checkpoints", "baseline"):
            shutil.rmtree(out / name, ignore_errors=True)
        for name in report.FILES:
            (out / name).unlink(missing_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        (out / ".run.json").write_text(json.dumps(settings))
        (out / ".run.json").replace(file)
    ranks.barrier()


def run(args: argparse.Namespace) -> None:
    if args.threads:
        torch.set_num_threads(args.threads)
    ranks, corpus, recipe, out = Ranks(args.parallel, args.device), load_corpus(args.data), recipe_of(args), args.out
    if min(len(corpus.train), len(corpus.val)) <= args.context:
        raise nm.NMError(f"{corpus.source} has too little text for a context of {args.context}; use more (--data) or a smaller --context.")
    if args.batch % ranks.readers:
        raise nm.NMError(f"--batch {args.batch} cannot be shared evenly by {ranks.readers} processes; make it a multiple of that.")
    name, settings = f"{type(recipe).__name__} {recipe.pattern}", {name: getattr(args, name) for name in SETTINGS}
    trainer = Trainer(args, corpus, recipe, ranks)
    claim(out, {**settings, "text": corpus.digest}, args.overwrite, ranks)
    if ranks.rank == 0:
        print(
            f"Training a GPT of {trainer.parameters:,} parameters on {corpus.source}, byte by byte: {args.steps:,} steps of "
            f"{args.batch * args.context:,} bytes with {name}{', then a dense one to compare' if args.baseline else ''}.",
            flush=True,
        )
    sparse = trainer.train(out, name)
    baseline: dict[str, Any] | None = None
    if args.baseline:
        dense = Trainer(args, corpus, None, ranks)
        baseline = dense.train(out / "baseline", "dense baseline")
        baseline["val_loss"] = dense.validate()
    ranks.end()
    if ranks.rank:
        return
    if ranks.kind != "none":  # the rest runs in one process, with the whole model from the last checkpoint
        trainer = Trainer(args, corpus, recipe_of(args), Ranks(device=str(ranks.device)))
        load(out / "checkpoints", trainer.model, trainer.optimizer, trainer.ranks)
    print("Compressing the model, saving it, reading it back and timing it ...", flush=True)
    handle = trainer.handle
    assert handle is not None
    sparse |= {"switch_step": handle.state.get("switch_step", 0), "remark": handle.report.remark, "layers": len(handle.layers)}
    sparse |= {"flops": trainer.flops(), **trainer.deploy(out)}
    title = f"{name} on {corpus.source}"
    report.plot(out / "curves.png", sparse.pop("rows"), baseline.pop("rows") if baseline else [], title, sparse["switch_step"])
    result = {
        "title": title,
        "config": settings,
        "corpus": {"source": corpus.source, "files": corpus.files, "train_bytes": len(corpus.train), "val_bytes": len(corpus.val)},
        "parameters": trainer.parameters,
        "sparse": sparse,
        "baseline": baseline,
        "val_loss_ratio": sparse["val_loss"] / baseline["val_loss"] if baseline else None,
        "versions": {"nmkernels": nm.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "threads": torch.get_num_threads(),
        "parallel": {"kind": ranks.kind, "ranks": ranks.count},
        "out": str(out),
        "files": [file for file in report.FILES if file == "result.json" or (out / file).exists()],
    }
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"\n{report.summary(result)}")


def main(words: Sequence[str] | None = None) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is in one process
            warnings.showwarning = lambda message, *_, **__: print(f"note: {message}", flush=True)
            run(arguments(words))
    except (nm.NMError, ValueError) as error:
        raise SystemExit(f"train.py: error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit("\nStopped. The same command, without --overwrite, continues after the last checkpoint.") from None


if __name__ == "__main__":
    main()
