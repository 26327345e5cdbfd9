"""``python -m nmkernels train``: real text to a sparse model to a compressed file that is proved to be the model.

A run is checked first, then trained, the dense baseline too, deployed, and written down in its folder.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from .._version import __version__
from ..audit import flops
from ..export import atomic_write
from ..models import GPT, Corpus, load_corpus
from ..pattern import CheckpointError, NMError
from ..recipes import Recipe, sparsify_
from ..recipes.methods.step import REASONS
from .config import TrainConfig, add_arguments, fresh, resumed, settings
from .deploy import deploy
from .folder import BASELINE, CHECKPOINTS, CURVES, RESULT, Folder, Store
from .log import ABOUT, LOG, Log, board_writer, notes, plot, quiet_threads, read_log, summary, title
from .sharded import load_shards, shards_of
from .world import World

__all__ = ["add_arguments", "run"]

PROG = "python -m nmkernels train"
VAL_WINDOWS = 256  # validation sequences at the end of a run; a quarter of them on the way
EVALS = 10  # validations on the way, for the curves


class Interrupted(Exception):
    """The user asked to stop; the message says what was saved."""


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of ``step`` (from 1): linear warm-up, then a cosine from ``lr`` to ``lr``/10."""
    warmup = max(1, round(config.warmup * config.steps))
    if step <= warmup:
        return config.lr * step / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


class Trainer:
    """A GPT with its optimizer, sparse under ``recipe``, or the dense baseline on plain PyTorch where ``recipe`` is None.

    Both start from the same weights and see the same batches, of which each rank of ``world`` reads its share. ``seconds`` is the time
    spent in steps, resumed runs included; ``losses`` are those since the last row of the log, when ``seconds`` was ``mark``.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus, recipe: Recipe | None, world: World | None = None) -> None:
        self.config, self.corpus = config, corpus
        self.world = world or World()
        self.device = device = self.world.device
        self.seconds = self.mark = 0.0
        self.losses: list[float] = []
        torch.manual_seed(config.seed)
        self.model = GPT(config.model).to(device)
        self.parameters = self.model.parameter_count()
        # first, because a recipe may add parameters
        self.handle = None if recipe is None else sparsify_(self.model, recipe)
        self.loss = self.world.spread(self.model)
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        vectors = [p for p in self.model.parameters() if p.dim() != 2]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        keywords: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2), "weight_decay": config.weight_decay}
        if recipe is None or self.handle is None:
            one_by_one = self.world.parallel == "tp"  # sharded and plain tensors do not go together
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, fused=not one_by_one, foreach=False, **keywords)
        else:
            self.optimizer = self.handle.attach(recipe.optimizer(groups, **keywords))
        # a recipe may also give some groups a multiple of the rate
        self.multiples = [group["lr"] / config.lr for group in self.optimizer.param_groups]

    def step(self, step: int) -> float:
        """One optimizer step, counted from 1; returns the training loss in nats per byte, of this rank's share of the batch."""
        for group, multiple in zip(self.optimizer.param_groups, self.multiples, strict=True):
            group["lr"] = learning_rate(self.config, step) * multiple
        x, y = self.corpus.batch(self.config.seed, step, self.config.batch, self.config.context)
        x, y = self.world.share(x), self.world.share(y)
        loss = self.loss(x.to(self.device), y.to(self.device))
        value = loss.item()
        if not math.isfinite(value):
            raise NMError(
                f"the loss is {value} at step {step}: training has diverged. Lower --lr (it is {self.config.lr:g}), "
                "or resume from a checkpoint written before."
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.world.clip(self.model, self.config.clip)
        self.optimizer.step()
        return value

    @torch.no_grad()
    def validate(self, windows: int = VAL_WINDOWS) -> float:
        """Mean loss over validation text, in nats per byte, of the weights that would be deployed now."""
        total, count = 0.0, 0
        self.model.eval()
        with self.handle.deployable() if self.handle is not None else nullcontext():
            for batch in self.corpus.val_batches(self.config.context, self.config.batch, windows):
                x, y = (self.world.share(part).to(self.device) for part in batch)
                loss = self.loss(x, y).item()  # of no rows too: sharded layers are gathered by all ranks or none
                total += loss * len(x) if len(x) else 0.0
                count += len(x)
        self.model.train()
        sums = self.world.sum(total, count)
        return sums[0] / sums[1]

    def metrics(self) -> dict[str, float]:
        """The recipe's metrics after the last step; none of the baseline."""
        return {} if self.handle is None else {name: value.item() for name, value in self.handle.metrics().items()}

    def flops(self) -> dict[str, float]:
        """What the whole run and one token of inference cost by ``nm.flops``, attention's scores included; none of the baseline."""
        if self.handle is None:
            return {}
        c = self.config
        # T₀ as it came out, the end where there was no switch yet; other recipes have none
        switch = (self.handle.state["switch_step"] or c.steps) if "switch_step" in self.handle.state else None
        scores = c.layers * 2.0 * c.context * c.width  # two GEMMs, half of each behind the causal mask
        counted = flops(self.model, self.handle.recipe, c.steps, tokens=c.batch * c.context, other=scores, switch_step=switch)
        return {name: getattr(counted, name) for name in ("training", "dense_training", "inference", "dense_inference")}

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint after ``step`` holds. The recipe's own state lies in the optimizer's."""
        return {
            "step": step,
            "config": asdict(self.config),
            "corpus": self.corpus.digest,
            **self._tensors(),
            "rng": torch.get_rng_state(),
            "seconds": self.seconds,
            "unlogged": {"losses": self.losses, "mark": self.mark},
        }

    def _tensors(self) -> dict[str, Any]:
        if self.world.sharded:
            return shards_of(self.model, self.optimizer)
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any], path: object) -> int:
        """Continue from ``state``; returns the step it was written after."""
        if state["corpus"] != self.corpus.digest:
            raise CheckpointError(f"{path}: the text to train on has changed since ({self.corpus.source}); give the same with --data.")
        try:
            if self.world.sharded or "shards" in state:
                load_shards(self.model, self.optimizer, state)
            else:
                self.model.load_state_dict(state["model"])
                self.optimizer.load_state_dict(state["optimizer"])
        except CheckpointError:
            raise
        except (RuntimeError, ValueError, KeyError) as error:
            if self.world.explain(error) is not None:
                raise
            raise CheckpointError(f"{path} does not fit this run: {str(error).splitlines()[0]}") from error
        torch.set_rng_state(state["rng"])
        self.seconds = float(state["seconds"])
        self.losses, self.mark = list(state["unlogged"]["losses"]), float(state["unlogged"]["mark"])
        return int(state["step"])


@contextmanager
def stop_request() -> Iterator[list[int]]:
    """While entered, in the main thread, the first SIGINT or SIGTERM is put into the list, and a second one interrupts at once."""
    asked: list[int] = []

    # prints nothing: it may have interrupted a print
    def handle(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    taken = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, handle) for number in taken}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(trainer: Trainer, store: Store, log: Log | None, start: int, args: argparse.Namespace) -> None:
    """Run steps ``start`` + 1 to the end, with a checkpoint every ``args.checkpoint_every`` steps and after the last.

    ``log``: None on the ranks that say nothing.
    """
    config, world = trainer.config, trainer.world
    eval_every = max(1, config.steps // EVALS)
    with stop_request() as asked:
        for step in range(start + 1, config.steps + 1):
            begin = time.perf_counter()
            trainer.losses.append(trainer.step(step))
            trainer.seconds += time.perf_counter() - begin
            evaluated = step % eval_every == 0
            if evaluated or step % args.log_every == 0 or step == config.steps:
                losses = world.mean(*trainer.losses)
                speed = len(losses) * config.batch * config.context / max(trainer.seconds - trainer.mark, 1e-9)
                row: dict[str, Any] = {"step": step, "loss": sum(losses) / len(losses), "lr": learning_rate(config, step)}
                if evaluated:
                    row["val_loss"] = trainer.validate(VAL_WINDOWS // 4)
                if log is not None:
                    log.row({**row, "tokens_per_s": speed, **trainer.metrics()})
                trainer.losses, trainer.mark = [], trainer.seconds
            if log is not None:
                log.tick()
            stop = any(world.sum(len(asked)))  # ranks are asked at different steps
            if step % args.checkpoint_every == 0 or step == config.steps or stop:
                trainer.losses = world.mean(*trainer.losses)
                path = store.save(trainer.state(step))
            if stop:
                raise Interrupted(f"Stopped after step {step}; saved in {path}.")


def opening(trainer: Trainer, baseline: bool) -> str:
    """What is about to be trained, and on what."""
    config = trainer.config
    return (
        f"Training a GPT of {trainer.parameters:,} parameters on {trainer.corpus.source}, byte by byte: {config.steps:,} steps of "
        f"{config.batch * config.context:,} bytes with {title(config.recipe)}{', then the same dense, to compare' if baseline else ''}."
    )


class Run:
    """One run of ``train``; building it checks everything that can be checked before training, and locks the folder."""

    def __init__(self, args: argparse.Namespace, folder: Folder, world: World) -> None:
        self.args, self.folder, self.out, self.world = args, folder, folder.path, world
        self.stream = sys.stderr if args.json else sys.stdout
        if args.threads:
            torch.set_num_threads(args.threads)
        try:
            torch.zeros(1, device=world.device).item()  # the meta device makes tensors and cannot read them
        except (RuntimeError, AssertionError) as error:
            raise NMError(f"--device {args.device} cannot be used here: {str(error).splitlines()[0]}") from error
        if args.tensorboard:
            board_writer()
        self.resumes = args.resume is not None
        world.lead(lambda: folder.check(resume=self.resumes, overwrite=args.overwrite))
        self.store = Store(self.out / CHECKPOINTS, world)
        state = self.store.load(args.resume or None) if self.resumes else None
        if state is None:
            self.config = fresh(settings(args))
        else:
            self.config = resumed(settings(args, state["config"]), state["config"], args.resume or self.store.paths()[-1])
        recipe = self.config.build_recipe()
        world.check(self.config.batch)
        self.corpus = load_corpus(args.data)
        self.corpus.check(self.config.context)
        if world.lead(lambda: self.corpus.digest) != self.corpus.digest:
            raise NMError(f"process {world.rank} reads another text than process 0 ({self.corpus.source}); give all the same with --data.")
        self.trainer = Trainer(self.config, self.corpus, recipe, world)
        self.start = self.trainer.load(state, self.store.folder) if state is not None else 0
        world.lead(folder.take)
        # again, where it was only locked now: another run may have been here meanwhile
        world.lead(lambda: folder.check(resume=self.resumes, overwrite=args.overwrite))

    def execute(self) -> None:
        """Train what is left to train, deploy, write ``result.json`` and show it."""
        world, name = self.world, title(self.config.recipe)
        if not self.resumes:
            world.lead(self.folder.clear)
        elif self.args.resume:
            world.lead(lambda: self.store.set_aside(self.start))
        self._say(opening(self.trainer, self.args.baseline))
        speed = self._train(self.trainer, self.out, name, self.start)
        baseline: dict[str, Any] | None = None
        if self.args.baseline:
            dense = Trainer(self.config, self.corpus, None, world)
            store = Store(self.out / BASELINE / CHECKPOINTS, world)
            start = dense.load(store.load(), store.folder) if self.resumes and store.paths() else 0
            baseline = {**self._train(dense, self.out / BASELINE, "dense baseline", start), "val_loss": dense.validate()}
        if world.meets:
            # the rest is for one process, which takes the whole model from the last checkpoint
            world.part()
            if not world.leads:
                return
            recipe = self.config.build_recipe()
            self.trainer = Trainer(self.config, self.corpus, recipe, world.alone())
            self.trainer.load(self.store.load(), self.store.folder)
        self._say("Compressing the model, writing it, reading it back and timing it ...")
        out, corpus, handle = self.out, self.corpus, self.trainer.handle
        assert handle is not None
        switch_step = handle.state.get("switch_step", 0)
        reason = REASONS[handle.state.get("switch_reason", 0)]
        switch = {"switch_step": switch_step, "switch_reason": reason, "remark": handle.report.remark}
        sparse = {**speed, **switch, "layers": len(handle.layers), "flops": self.trainer.flops()}
        sparse.update(deploy(self.trainer, out))
        files = [name for name in ABOUT if (out / name).exists() and name != CURVES] + [RESULT]
        if plot(out / CURVES, read_log(out / LOG), read_log(out / BASELINE / LOG), f"{name} on {corpus.source}", switch_step):
            files.append(CURVES)
        result = {
            "config": asdict(self.config),
            "corpus": {"source": corpus.source, "files": corpus.files, "train_bytes": len(corpus.train), "val_bytes": len(corpus.val)},
            "parameters": self.trainer.parameters,
            "sparse": sparse,
            "baseline": baseline,
            "val_loss_ratio": sparse["val_loss"] / baseline["val_loss"] if baseline else None,
            "versions": {"nmkernels": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "threads": torch.get_num_threads(),
            "parallel": {"kind": world.parallel, "ranks": world.ranks, "shard_ways": world.ways},
            "out": str(out),
            "files": files,
        }
        text = json.dumps(result, indent=2)
        atomic_write(out / RESULT, lambda temporary: temporary.write_text(f"{text}\n"))
        print(text if self.args.json else f"\n{summary(result)}")

    def _say(self, text: str) -> None:
        if self.world.leads:
            print(text, file=self.stream, flush=True)

    def _train(self, trainer: Trainer, folder: Path, label: str, start: int) -> dict[str, float | None]:
        """Train to the end; the last loss, and how fast it went."""
        store = Store(folder / CHECKPOINTS, self.world)
        self.world.lead(store.drop)  # where a kill came between saving and this
        if not self.world.leads:
            train(trainer, store, None, start, self.args)
            return {}
        if start:
            print(f"{label}: resumed after step {start} of {self.config.steps}", file=self.stream, flush=True)
        with quiet_threads(), Log(folder, label, start, self.config.steps, self.stream, self.args.tensorboard) as log:
            train(trainer, store, log, start, self.args)
        rows = read_log(folder / LOG)
        return {
            "train_loss": rows[-1].get("loss") if rows else None,  # a run that was resumed at its end may have lost its log
            "train_tokens_per_s": self.config.tokens / max(trainer.seconds, 1e-9),
            "seconds": trainer.seconds,
        }


def run(args: argparse.Namespace) -> int:
    """Train, deploy, report; 0 done, 1 failed on the way, 2 refused at the start, 130 interrupted with the way to resume."""
    try:
        world = World.launched(args.parallel, args.shard_ways, args.device)
    except NMError as error:
        if not int(os.environ.get("RANK", 0)):  # every process says the same
            print(f"{PROG}: error: {error}", file=sys.stderr)
        return 2
    with world, Folder(args.out or Path("demo_out" if args.demo else "runs/train")) as folder:
        try:
            return _run(args, folder, world)
        except RuntimeError as error:
            if (said := world.explain(error)) is None:
                raise
            return world.fail(f"{PROG}: error: {said}", 1)


def _run(args: argparse.Namespace, folder: Folder, world: World) -> int:
    args.baseline = args.baseline or args.demo
    try:
        job = Run(args, folder, world)
    except (NMError, OSError) as error:
        return world.fail(f"{PROG}: error: {error}", 2)
    try:
        with notes(job.stream):
            job.execute()
    except (Interrupted, KeyboardInterrupt) as stop:
        words = [*world.command, "--out", str(job.out), "--resume"]
        words += ["--data", str(args.data)] if args.data else []
        words += ["--baseline"] if args.baseline else []
        return world.fail(f"\n{str(stop) or 'Stopped.'}\nTo go on: {shlex.join(words)}", 130)
    except NMError as error:
        return world.fail(f"{PROG}: error: {error}", 1)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        return world.fail(f"{PROG}: error: {error.filename or 'output'} could not be written: {error.strerror or error}.", 1)
    return 0
