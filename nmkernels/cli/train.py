"""``python -m nmkernels train``: train a sparse GPT on text, compress it, and check that the saved file is the same model.

A run first checks its options and its folder, then trains (also the dense baseline, if asked for), deploys, and writes its results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from .._version import __version__
from ..export import atomic_write
from ..models import load_corpus
from ..pattern import NMError
from ..recipes.methods.step import REASONS
from .config import add_arguments, new_config, resumed_config, settings
from .deploy import deploy
from .folder import BASELINE, CHECKPOINTS, CURVES, RESULT, Folder, Store
from .log import ABOUT, LOG, Log, board_writer, notes, plot, quiet_threads, read_log, summary, title
from .ranks import Ranks
from .trainer import VAL_WINDOWS, Trainer, learning_rate

__all__ = ["add_arguments", "run"]

PROG = "python -m nmkernels train"
EVALS = 10
"""Validations during training, for the curves."""


class Interrupted(Exception):
    """The user asked the run to stop; the message names the checkpoint that was saved."""


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Catch the first SIGINT or SIGTERM, in the main thread: its number is added to the list. A second one interrupts at once."""
    received: list[int] = []

    # does not print: the signal may have interrupted a print
    def handle(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(trainer: Trainer, store: Store, log: Log | None, start: int, args: argparse.Namespace) -> None:
    """Run the steps after ``start`` to the end, with a checkpoint every ``args.checkpoint_every`` steps and after the last.

    ``log`` is None on ranks that do not print.
    """
    config, ranks = trainer.config, trainer.ranks
    eval_every = max(1, config.steps // EVALS)
    with stop_requests() as received:
        for step in range(start + 1, config.steps + 1):
            begin = time.perf_counter()
            trainer.losses.append(trainer.step(step))
            trainer.seconds += time.perf_counter() - begin
            evaluated = step % eval_every == 0
            if evaluated or step % args.log_every == 0 or step == config.steps:
                losses = ranks.mean(*trainer.losses)
                speed = len(losses) * config.batch * config.context / max(trainer.seconds - trainer.mark, 1e-9)
                row: dict[str, Any] = {"step": step, "loss": sum(losses) / len(losses), "lr": learning_rate(config, step)}
                if evaluated:
                    row["val_loss"] = trainer.validate(VAL_WINDOWS // 4)
                if log is not None:
                    log.row({**row, "tokens_per_s": speed, **trainer.metrics()})
                trainer.losses, trainer.mark = [], trainer.seconds
            if log is not None:
                log.tick()
            stop = any(ranks.sum(len(received)))  # the signal reaches ranks at different steps
            if step % args.checkpoint_every == 0 or step == config.steps or stop:
                trainer.losses = ranks.mean(*trainer.losses)
                path = store.save(trainer.state(step))
            if stop:
                raise Interrupted(f"Stopped after step {step}; saved in {path}.")


def opening(trainer: Trainer, baseline: bool) -> str:
    """The first line that a run prints: what is trained, and on what."""
    config = trainer.config
    return (
        f"Training a GPT of {trainer.parameters:,} parameters on {trainer.corpus.source}, byte by byte: {config.steps:,} steps of "
        f"{config.batch * config.context:,} bytes with {title(config.recipe)}{', then a dense one to compare' if baseline else ''}."
    )


class Run:
    """One run of ``train``. The constructor checks everything that can be checked before training, and locks the folder."""

    def __init__(self, args: argparse.Namespace, folder: Folder, ranks: Ranks) -> None:
        self.args, self.folder, self.out, self.ranks = args, folder, folder.path, ranks
        self.stream = sys.stderr if args.json else sys.stdout
        if args.threads:
            torch.set_num_threads(args.threads)
        try:
            torch.zeros(1, device=ranks.device).item()  # .item(): the meta device makes tensors but cannot read them
        except (RuntimeError, AssertionError) as error:
            raise NMError(f"--device {args.device} cannot be used here: {str(error).splitlines()[0]}") from error
        if args.tensorboard:
            board_writer()
        self.resumes = args.resume is not None
        ranks.on_main(lambda: folder.check(resume=self.resumes, overwrite=args.overwrite))
        self.store = Store(self.out / CHECKPOINTS, ranks)
        state = self.store.load(args.resume or None) if self.resumes else None
        if state is None:
            self.config = new_config(settings(args))
        else:
            self.config = resumed_config(settings(args, state["config"]), state["config"], args.resume or self.store.paths()[-1])
        recipe = self.config.build_recipe()
        ranks.check_batch(self.config.batch)
        self.corpus = load_corpus(args.data)
        self.corpus.check(self.config.context)
        if ranks.on_main(lambda: self.corpus.digest) != self.corpus.digest:
            raise NMError(f"process {ranks.rank} reads another text than process 0 ({self.corpus.source}); pass the same --data to all.")
        self.trainer = Trainer(self.config, self.corpus, recipe, ranks)
        self.start = self.trainer.load(state, self.store.folder) if state is not None else 0
        ranks.on_main(folder.take)
        # check again: before the lock was taken, another run may have used the folder
        ranks.on_main(lambda: folder.check(resume=self.resumes, overwrite=args.overwrite))

    def execute(self) -> None:
        """Train the remaining steps, deploy, write ``result.json`` and print the summary."""
        ranks, name = self.ranks, title(self.config.recipe)
        if not self.resumes:
            ranks.on_main(self.folder.clear)
        elif self.args.resume:
            ranks.on_main(lambda: self.store.set_aside(self.start))
        self._say(opening(self.trainer, self.args.baseline))
        speed = self._train(self.trainer, self.out, name, self.start)
        baseline: dict[str, Any] | None = None
        if self.args.baseline:
            dense = Trainer(self.config, self.corpus, None, ranks)
            store = Store(self.out / BASELINE / CHECKPOINTS, ranks)
            start = dense.load(store.load(), store.folder) if self.resumes and store.paths() else 0
            baseline = {**self._train(dense, self.out / BASELINE, "dense baseline", start), "val_loss": dense.validate()}
        if ranks.connected:
            # the rest runs in one process, which loads the whole model from the last checkpoint
            ranks.disconnect()
            if not ranks.is_main:
                return
            recipe = self.config.build_recipe()
            self.trainer = Trainer(self.config, self.corpus, recipe, ranks.alone())
            self.trainer.load(self.store.load(), self.store.folder)
        self._say("Compressing the model, saving it, reading it back and timing it ...")
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
            "parallel": {"kind": ranks.parallel, "ranks": ranks.count, "shard_ways": ranks.shard_ways},
            "out": str(out),
            "files": files,
        }
        text = json.dumps(result, indent=2)
        atomic_write(out / RESULT, lambda temporary: temporary.write_text(f"{text}\n"))
        print(text if self.args.json else f"\n{summary(result)}")

    def _say(self, text: str) -> None:
        if self.ranks.is_main:
            print(text, file=self.stream, flush=True)

    def _train(self, trainer: Trainer, folder: Path, label: str, start: int) -> dict[str, float | None]:
        """Train to the end; returns the last loss, the speed and the time."""
        store = Store(folder / CHECKPOINTS, self.ranks)
        self.ranks.on_main(store.drop)  # an earlier run may have been killed between saving and this
        if not self.ranks.is_main:
            train(trainer, store, None, start, self.args)
            return {}
        if start:
            print(f"{label}: resumed after step {start} of {self.config.steps}", file=self.stream, flush=True)
        with quiet_threads(), Log(folder, label, start, self.config.steps, self.stream, self.args.tensorboard) as log:
            train(trainer, store, log, start, self.args)
        rows = read_log(folder / LOG)
        return {
            "train_loss": rows[-1].get("loss") if rows else None,  # a run resumed at its end may have lost its log
            "train_tokens_per_s": self.config.tokens / max(trainer.seconds, 1e-9),
            "seconds": trainer.seconds,
        }


def run(args: argparse.Namespace) -> int:
    """Train, deploy, report; 0 done, 1 failed during the run, 2 refused at the start, 130 interrupted (the message says how to resume)."""
    try:
        ranks = Ranks.launched(args.parallel, args.shard_ways, args.device)
    except NMError as error:
        if not int(os.environ.get("RANK", 0)):  # every process fails alike
            print(f"{PROG}: error: {error}", file=sys.stderr)
        return 2
    with ranks, Folder(args.out or Path("demo_out" if args.demo else "runs/train")) as folder:
        try:
            return _run(args, folder, ranks)
        except RuntimeError as error:
            if (message := ranks.explain(error)) is None:
                raise
            return ranks.fail(f"{PROG}: error: {message}", 1)


def _run(args: argparse.Namespace, folder: Folder, ranks: Ranks) -> int:
    args.baseline = args.baseline or args.demo
    try:
        job = Run(args, folder, ranks)
    except (NMError, OSError) as error:
        return ranks.fail(f"{PROG}: error: {error}", 2)
    try:
        with notes(job.stream):
            job.execute()
    except (Interrupted, KeyboardInterrupt) as stop:
        words = [*ranks.command, "--out", str(job.out), "--resume"]
        words += ["--data", str(args.data)] if args.data else []
        words += ["--baseline"] if args.baseline else []
        return ranks.fail(f"\n{str(stop) or 'Stopped.'}\nTo resume: {shlex.join(words)}", 130)
    except NMError as error:
        return ranks.fail(f"{PROG}: error: {error}", 1)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        return ranks.fail(f"{PROG}: error: {error.filename or 'output'} could not be written: {error.strerror or error}.", 1)
    return 0
