"""A small MLP on handwritten digits: a run takes seconds, so there can be many rates, optimizers and seeds."""

from __future__ import annotations

from torch import nn

from .base import Settings, task
from .digits import BATCH, CLASSES, SIDE, Digits


@task("mlp")
class DigitsMLP(Digits):
    """64-128-128-10 with ReLU: 26 thousand parameters, 25 thousand of them in the two hidden layers, which are made sparse.

    1000 steps are 53 epochs. No weight decay and no clipping, so that AdamW and SGD with momentum differ only in their step.
    """

    settings = Settings(
        steps=1000,
        lr=5.5e-3,
        weight_decay=0.0,
        clip=None,
        tuning_seeds=10,
        seeds=10,
        patterns=("2:4", "1:8", "1:16"),
        seconds=3.0,
    )
    tokens = BATCH

    def model(self) -> nn.Module:
        width = 128
        hidden = nn.Linear(SIDE * SIDE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, CLASSES))
