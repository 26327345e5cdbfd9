"""Training of the byte-level GPT: the model, its optimizer, one step, validation, and what a checkpoint holds."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch

from ..audit import flops
from ..models import GPT, Corpus
from ..pattern import CheckpointError, NMError
from ..recipes import Recipe, sparsify_
from .config import TrainConfig
from .ranks import Ranks
from .sharded import load_shards, shards_of

VAL_WINDOWS = 256
"""Validation sequences at the end of a run; validations during training use a quarter of them."""


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of ``step`` (from 1): linear warm-up, then a cosine from ``lr`` to ``lr``/10."""
    warmup = max(1, round(config.warmup * config.steps))
    if step <= warmup:
        return config.lr * step / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


class Trainer:
    """A GPT with its optimizer: sparse under ``recipe``, or the dense baseline in plain PyTorch if ``recipe`` is None.

    Both start from the same weights and read the same batches, of which each rank reads its share. ``seconds`` is the time spent in
    steps, resumed runs included; ``losses`` are the losses since the last row of the log, written when ``seconds`` was ``mark``.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus, recipe: Recipe | None, ranks: Ranks | None = None) -> None:
        self.config, self.corpus = config, corpus
        self.ranks = ranks or Ranks()
        self.device = device = self.ranks.device
        self.seconds = self.mark = 0.0
        self.losses: list[float] = []
        torch.manual_seed(config.seed)
        self.model = GPT(config.model).to(device)
        self.parameters = self.model.parameter_count()
        # before the optimizer: a recipe may add parameters
        self.handle = None if recipe is None else sparsify_(self.model, recipe)
        self.loss = self.ranks.parallelize(self.model)
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        vectors = [p for p in self.model.parameters() if p.dim() != 2]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        keywords: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2), "weight_decay": config.weight_decay}
        if recipe is None or self.handle is None:
            one_by_one = self.ranks.parallel == "tp"  # one fused call cannot take sharded and plain tensors together
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, fused=not one_by_one, foreach=False, **keywords)
        else:
            self.optimizer = self.handle.attach(recipe.optimizer(groups, **keywords))
        # a recipe may scale the learning rate of some groups
        self.lr_factors = [group["lr"] / config.lr for group in self.optimizer.param_groups]

    def step(self, step: int) -> float:
        """One optimizer step, counted from 1; returns the training loss in nats per byte of this rank's share of the batch."""
        for group, factor in zip(self.optimizer.param_groups, self.lr_factors, strict=True):
            group["lr"] = learning_rate(self.config, step) * factor
        x, y = self.corpus.batch(self.config.seed, step, self.config.batch, self.config.context)
        x, y = self.ranks.own_rows(x), self.ranks.own_rows(y)
        loss = self.loss(x.to(self.device), y.to(self.device))
        value = loss.item()
        if not math.isfinite(value):
            raise NMError(
                f"the loss is {value} at step {step}: training has diverged. Lower --lr (it is {self.config.lr:g}), "
                "or resume from an earlier checkpoint."
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.ranks.clip_grad_norm(self.model, self.config.clip)
        self.optimizer.step()
        return value

    @torch.no_grad()
    def validate(self, windows: int = VAL_WINDOWS, other: GPT | None = None) -> float:
        """Mean validation loss, in nats per byte, of the weights that would be deployed now, or of another model."""
        total, count = 0.0, 0
        loss_of = self.loss if other is None else other.loss
        self.model.eval()
        with self.handle.deployable() if self.handle is not None else nullcontext():
            for batch in self.corpus.val_batches(self.config.context, self.config.batch, windows):
                x, y = (self.ranks.own_rows(part).to(self.device) for part in batch)
                loss = loss_of(x, y).item()  # also with no rows: all ranks gather sharded layers together
                total += loss * len(x) if len(x) else 0.0
                count += len(x)
        self.model.train()
        sums = self.ranks.sum(total, count)
        return sums[0] / sums[1]

    def metrics(self) -> dict[str, float]:
        """The recipe's metrics after the last step; empty for the baseline."""
        return {} if self.handle is None else {name: value.item() for name, value in self.handle.metrics().items()}

    def flops(self) -> dict[str, float]:
        """FLOPs of the whole run and of one token of inference by ``nm.flops``, with attention scores; empty for the baseline."""
        if self.handle is None:
            return {}
        c = self.config
        # the T₀ that STEP chose, or the last step if it never switched; other recipes have no T₀
        switch = (self.handle.state["switch_step"] or c.steps) if "switch_step" in self.handle.state else None
        scores = c.layers * 2.0 * c.context * c.width  # two GEMMs, half of each behind the causal mask
        counted = flops(self.model, self.handle.recipe, c.steps, tokens=c.batch * c.context, other=scores, switch_step=switch)
        return {name: getattr(counted, name) for name in ("training", "dense_training", "inference", "dense_inference")}

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint after ``step`` holds. The recipe's state is in the optimizer's."""
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
        if self.ranks.sharded:
            return shards_of(self.model, self.optimizer)
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any], path: object) -> int:
        """Continue from ``state``, read from ``path``; returns the step after which it was saved."""
        if state["corpus"] != self.corpus.digest:
            raise CheckpointError(f"{path}: the training text ({self.corpus.source}) has changed since; pass the same one with --data.")
        try:
            if self.ranks.sharded or "shards" in state:
                load_shards(self.model, self.optimizer, state)
            else:
                self.model.load_state_dict(state["model"])
                self.optimizer.load_state_dict(state["optimizer"])
        except CheckpointError:
            raise
        except (RuntimeError, ValueError, KeyError) as error:
            if self.ranks.explain(error) is not None:
                raise
            raise CheckpointError(f"{path} does not fit this run: {str(error).splitlines()[0]}") from error
        torch.set_rng_state(state["rng"])
        self.seconds = float(state["seconds"])
        self.losses, self.mark = list(state["unlogged"]["losses"]), float(state["unlogged"]["mark"])
        return int(state["step"])
