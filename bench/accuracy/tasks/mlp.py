"""A small perceptron on handwritten digits: a run takes seconds, so that rates, optimizers and seeds can be many."""

from __future__ import annotations

import math

from torch import nn

from .base import Settings, task
from .digits import BATCH, CLASSES, SIDE, Digits


@task("mlp")
class DigitsMLP(Digits):
    """64-128-128-10 with ReLU: 26 thousand parameters, 25 thousand of them in the two hidden layers, which are made sparse.

    1000 steps are 53 epochs. No weight decay and no clipping, so that AdamW and SGD with momentum differ in nothing but their step.
    """

    settings = Settings(
        steps=1000,
        lr=3e-3,
        lrs=(1e-3, 3e-3, 1e-2),
        scouted=(3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
        betas=(0.9, 0.999),
        weight_decay=0.0,
        clip=math.inf,
    )
    tokens = BATCH

    def model(self) -> nn.Module:
        width = 128
        hidden = nn.Linear(SIDE * SIDE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, CLASSES))
