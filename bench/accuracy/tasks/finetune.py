"""Sparse fine-tuning: a GPT trained densely on source code is fine-tuned, sparse, on English prose (as in STEP's paper); and the same after
longer training, at rates far below it, as users fine-tune.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from examples.train_gpt.data import make_corpus, stdlib_texts
from examples.train_gpt.model import GPT

from ..data import kept
from .base import task
from .gpt import BATCH, CONTEXT, ByteGPT

CACHE = Path("build") / "accuracy"
"""The folder of the pretrained model."""

PRETRAINING = 2000
"""Dense steps on source code, at a rate that falls from ``PEAK`` to 0."""

PEAK = 4e-3
PROSE = "pydoc_data"
"""The folder of the standard library that holds the language reference as prose."""


@task("finetune")
class FineTuneGPT(ByteGPT):
    """The GPT of task ``gpt``, first dense on the standard library's code, then 500 steps on the language reference (465 thousand bytes).

    All runs start from the same pretrained weights; the seed is that of the data order. A run takes 12 to 14 CPU-seconds, and the
    pretraining, done once, a minute.
    """

    settings = replace(ByteGPT.settings, steps=500, lr=1.7e-3, seconds=13)
    pretraining = PRETRAINING

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        self.read(make_corpus({name: text.encode() for name, text in topics.items()}, "Python's language reference"))
        self.pretrained = pretrained(CACHE, self.pretraining)

    def model(self) -> nn.Module:
        model = GPT(self.config)
        model.load_state_dict(self.pretrained)
        return model


@task("finetune-low")
class FineTuneLow(FineTuneGPT):
    """The same after 20,000 dense steps, in 2000 steps at rates of at most a tenth of the pretraining's peak.

    At the rates of ``finetune``, above the pretraining's own, fine-tuning is a warm restart. A run takes 50 CPU-seconds, and the
    pretraining, done once, eight minutes.
    """

    settings = replace(FineTuneGPT.settings, steps=2000, lr=1.7e-4, rates=(1e-4, 1.7e-4, 3e-4), patterns=("2:4",), seconds=50)
    pretraining = 20_000


def pretrained(folder: Path, steps: int = PRETRAINING) -> dict[str, Tensor]:
    """The weights after dense training on code, read from ``folder`` if they are there; deterministic on one thread."""
    code = make_corpus({name: text for name, text in stdlib_texts().items() if not name.startswith(PROSE)}, "the Python standard library")

    def train() -> dict[str, Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = GPT(ByteGPT.config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.99), weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK, total_steps=steps, pct_start=0.05)
        for step in range(steps):
            loss = model.loss(*code.batch(0, step, BATCH, CONTEXT))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        return model.state_dict()

    return kept(folder / f"pretrained-{steps}-{code.digest}.pt", train)
