"""A byte-level GPT on the source text of Python's standard library."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from nmkernels.models import GPT, GPTConfig, load_corpus

from .base import Settings, Task, task

CONTEXT, BATCH = 64, 8
MAIN = ("dense", "asp", "srste", "step", "step-25", "sste", "mdgf", "mdgf-kao")
VARIANTS = ("ste", *Settings.variants, "sdgf", "sdgf-kao")
"""Methods with their own rate, and those at the shared rate, of the tasks that take half a minute."""

VAL_WINDOWS = 512
"""Number of windows of ``CONTEXT`` bytes for evaluation, spread over held-out files."""


@task("gpt")
class ByteGPT(Task):
    """137 thousand parameters, 98 thousand of them in layers that can be made sparse; half a million bytes of training in 1000 steps.

    A run of 1000 steps takes 25 to 30 CPU-seconds.
    """

    settings = Settings(
        steps=1000,
        lr=4e-3,
        start=(2e-3, 4e-3, 8e-3),
        factor=2,
        tuning_seeds=2,
        stages=("tune", "tuned", "shared", "controls", "variants", "lengths"),
        methods=MAIN,
        patterns=("1:8",),
        variants=VARIANTS,
        length_methods=("dense", "srste", "step-25", "sste", "mdgf"),
        seconds=28,
    )
    tokens = BATCH * CONTEXT

    def __init__(self) -> None:
        self.corpus = load_corpus()

    def model(self) -> nn.Module:
        return GPT(GPTConfig(width=64, layers=2, heads=4, context=CONTEXT))

    def batch(self, seed: int, step: int) -> tuple[Tensor, ...]:
        return self.corpus.batch(seed, step, BATCH, CONTEXT)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        assert isinstance(model, GPT)
        return model.loss(*batch)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, tuning: bool = False) -> dict[str, float]:
        losses = [(self.loss(model, batch).item(), len(batch[0])) for batch in self.corpus.val_batches(CONTEXT, 64, VAL_WINDOWS)]
        return {"val_loss": sum(loss * n for loss, n in losses) / sum(n for _, n in losses)}

    def data(self) -> str:
        return self.corpus.digest


@task("gpt-relu2")
class SquaredReLUGPT(ByteGPT):
    """The GPT with squared ReLU, whose activations can be made sparse."""

    settings = replace(ByteGPT.settings, stages=("shared",), methods=("dense", "act24"), patterns=("2:4",))

    def model(self) -> nn.Module:
        return GPT(GPTConfig(width=64, layers=2, heads=4, context=CONTEXT, activation="relu2"))
