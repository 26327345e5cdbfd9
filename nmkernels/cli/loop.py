"""The training loop around a Trainer: logging, checkpoints, and a clean stop on Ctrl-C.

One model in training: what a step does, how it is validated, and what a checkpoint of it holds.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from ..audit import flops
from ..models import GPT, Corpus
from ..pattern import CheckpointError, NMError
from ..recipes import Recipe, sparsify_
from .checkpoint import Store
from .config import TrainConfig
from .log import Log

VAL_WINDOWS = 256
"""Validation sequences at the end of a run; a quarter of them on the way."""


class DivergedError(NMError, RuntimeError):
    """The loss is no longer a finite number."""


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of ``step`` (from 1): linear warm-up, then a cosine from ``lr`` to ``lr``/10."""
    warmup = max(1, round(config.warmup * config.steps))
    if step <= warmup:
        return config.lr * step / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


class Trainer:
    """A GPT with its optimizer, sparse under ``recipe``, or its dense twin on plain PyTorch where ``recipe`` is None.

    Both start from the same weights and see the same batches. ``seconds`` is the time spent in steps, resumed runs included;
    ``losses`` are those since the last row of the log, when ``seconds`` was ``mark``; ``parameters`` counts the model's own.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus, recipe: Recipe | None, device: str = "cpu") -> None:
        self.config, self.corpus, self.device = config, corpus, device
        self.seconds = self.mark = 0.0
        self.losses: list[float] = []
        torch.manual_seed(config.seed)
        self.model = GPT(config.model).to(device)
        self.parameters = self.model.parameter_count()
        # first, because a recipe may add parameters
        self.handle = None if recipe is None else sparsify_(self.model, recipe)
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        vectors = [p for p in self.model.parameters() if p.dim() != 2]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        keywords: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2), "weight_decay": config.weight_decay}
        if recipe is None or self.handle is None:
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, fused=True, **keywords)
        else:
            self.optimizer = self.handle.attach(recipe.optimizer(groups, **keywords))
        # a recipe may also give some groups a multiple of the rate
        self.multiples = [group["lr"] / config.lr for group in self.optimizer.param_groups]

    def step(self, step: int) -> float:
        """One optimizer step, counted from 1; returns the training loss in nats per byte.

        Raises:
            DivergedError: the loss is NaN or infinite.
        """
        for group, multiple in zip(self.optimizer.param_groups, self.multiples, strict=True):
            group["lr"] = learning_rate(self.config, step) * multiple
        x, y = self.corpus.batch(self.config.seed, step, self.config.batch, self.config.context)
        loss = self.model.loss(x.to(self.device), y.to(self.device))
        value = loss.item()
        if not math.isfinite(value):
            raise DivergedError(
                f"the loss is {value} at step {step}: training has diverged. Lower --lr (it is {self.config.lr:g}), "
                "or resume from a checkpoint written before."
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        return value

    @torch.no_grad()
    def validate(self, windows: int = VAL_WINDOWS) -> float:
        """Mean loss over validation text, in nats per byte, of the weights that would be deployed now."""
        total, count = 0.0, 0
        self.model.eval()
        with self.handle.deployable() if self.handle is not None else nullcontext():
            for x, y in self.corpus.val_batches(self.config.context, self.config.batch, windows):
                total += self.model.loss(x.to(self.device), y.to(self.device)).item() * len(x)
                count += len(x)
        self.model.train()
        return total / count

    def metrics(self) -> dict[str, float]:
        """The recipe's figures after the last step; none for the twin."""
        return {} if self.handle is None else {name: value.item() for name, value in self.handle.metrics().items()}

    def flops(self) -> dict[str, float]:
        """What the whole run and one token of inference cost, counted by ``nm.flops``; attention's scores included; none for the twin."""
        if self.handle is None:
            return {}
        c = self.config
        # T₀ as it came out, the end where there was no switch yet; other recipes have none
        switch = (self.handle.state["switch_step"] or c.steps) if "switch_step" in self.handle.state else None
        scores = c.layers * 2.0 * c.context * c.width  # two products, half of each behind the causal mask
        counted = flops(self.model, self.handle.recipe, c.steps, tokens=c.batch * c.context, other=scores, switch_step=switch)
        return {name: getattr(counted, name) for name in ("training", "dense_training", "inference", "dense_inference")}

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint after ``step`` holds. The recipe's own state lies in the optimizer's."""
        return {
            "step": step,
            "config": asdict(self.config),
            "corpus": self.corpus.digest,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "seconds": self.seconds,
            "unlogged": {"losses": self.losses, "mark": self.mark},
        }

    def load(self, state: dict[str, Any], path: object) -> int:
        """Continue from ``state``; returns the step it was written after.

        Raises:
            CheckpointError: it is of another recipe or model, or the text has changed since.
        """
        if state["corpus"] != self.corpus.digest:
            raise CheckpointError(f"{path}: the text to train on has changed since ({self.corpus.source}); give the same with --data.")
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path} does not fit this run: {str(error).splitlines()[0]}") from error
        torch.set_rng_state(state["rng"])
        self.seconds = float(state["seconds"])
        unlogged = state.get("unlogged", {"losses": [], "mark": self.seconds})  # earlier versions did not keep it
        self.losses, self.mark = list(unlogged["losses"]), float(unlogged["mark"])
        return int(state["step"])


EVALS = 10
"""Validations on the way, for the curves."""


class Interrupted(Exception):
    """The user asked to stop; the checkpoint at ``path`` holds everything up to ``step``."""

    def __init__(self, step: int, path: Path) -> None:
        super().__init__(f"stopped after step {step}")
        self.step, self.path = step, path


class StopRequest:
    """While entered, the first SIGINT or SIGTERM sets ``asked``, and a second one interrupts at once.

    Signals can only be taken over in the main thread; elsewhere this does nothing. The handler prints nothing: it may have
    interrupted a print.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def train(trainer: Trainer, store: Store, log: Log, start: int, *, checkpoint_every: int, log_every: int) -> None:
    """Run steps ``start`` + 1 to the end, with a checkpoint every ``checkpoint_every`` steps and after the last.

    Raises:
        Interrupted: a signal came; the checkpoint is written. DivergedError: the loss is not finite.
    """
    config = trainer.config
    eval_every = max(1, config.steps // EVALS)
    with StopRequest() as stop:
        for step in range(start + 1, config.steps + 1):
            begin = time.perf_counter()
            trainer.losses.append(trainer.step(step))
            trainer.seconds += time.perf_counter() - begin
            evaluated = step % eval_every == 0
            if evaluated or step % log_every == 0 or step == config.steps:
                losses = trainer.losses
                speed = len(losses) * config.batch * config.context / max(trainer.seconds - trainer.mark, 1e-9)
                row: dict[str, Any] = {"step": step, "loss": sum(losses) / len(losses), "lr": learning_rate(config, step)}
                if evaluated:
                    row["val_loss"] = trainer.validate(VAL_WINDOWS // 4)
                log.row({**row, "tokens_per_s": speed, **trainer.metrics()})
                trainer.losses, trainer.mark = [], trainer.seconds
            log.tick()
            if step % checkpoint_every == 0 or step == config.steps or stop.asked:
                path = store.save(trainer.state(step))
            if stop.asked:
                raise Interrupted(step, path)
