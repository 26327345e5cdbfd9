"""A byte-level GPT on the source text of Python's standard library."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.train_gpt.data import Corpus, load_corpus
from examples.train_gpt.model import GPT, GPTConfig

from .base import Settings, Task, task, to_model

CONTEXT, BATCH = 64, 8


@task("gpt")
class ByteGPT(Task):
    """137 thousand parameters, 98 thousand of them in layers that can be made sparse; half a million bytes of training in 1000 steps.

    A run of 1000 steps takes 25 to 30 CPU-seconds.
    """

    settings = Settings(steps=1000, lr=3e-3, seconds=28)
    tokens = BATCH * CONTEXT
    config: ClassVar = GPTConfig(width=64, layers=2, heads=4, context=CONTEXT)
    size: ClassVar[int] = BATCH
    windows: ClassVar[int] = 512
    """The most windows of the context's length for an evaluation, spread over its half of the held-out text."""

    def __init__(self) -> None:
        self.read(load_corpus())

    def read(self, corpus: Corpus) -> None:
        """Use this text."""
        self.corpus, self.digest = corpus, f"{corpus.digest} in halves"

    def model(self) -> nn.Module:
        return GPT(self.config)

    def batch(self, seed: int, step: int) -> tuple[Tensor, ...]:
        return self.corpus.batch(seed, step, self.size, self.config.context)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module, tuning: bool = False) -> dict[str, float]:
        text = self.corpus.val
        middle = len(text) // 2  # the first half is for choosing rates
        part = replace(self.corpus, val=text[:middle] if tuning else text[middle:])
        batches = part.val_batches(self.config.context, 64, self.windows)
        losses = [(self.loss(model, to_model(model, *batch)).item(), len(batch[0])) for batch in batches]
        return {"val_loss": sum(loss * n for loss, n in losses) / sum(n for _, n in losses)}
