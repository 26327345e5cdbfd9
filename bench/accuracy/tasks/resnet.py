"""A small residual network on handwritten digits: convolutions and batch norm."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from .base import Settings, task
from .digits import BATCH, CLASSES, SIDE, Digits

NARROW, WIDE = 16, 32
"""Channels of the first and of the second block."""


class Block(nn.Module):
    """Two 3 × 3 convolutions with batch norm around which the input is added (He et al., CVPR 2016).

    Where the block has more channels than its input, the first convolution has stride 2, and the input is averaged over 2 × 2 pixels and
    padded with zero channels, which takes no weights (their option A).
    """

    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__()
        self.more = channels - inputs
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride=2 if self.more else 1, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` ``[batch, inputs, side, side]`` to ``[batch, channels, side, side]``, or half the side where channels are more."""
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.more:
            x = F.pad(F.avg_pool2d(x, 2), (0, 0, 0, 0, 0, self.more))
        return F.relu(x + y)


class ResNet(nn.Module):
    """A first convolution, which has one input channel and stays dense, two blocks, and a linear layer on the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, NARROW, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(NARROW)
        self.blocks = nn.Sequential(Block(NARROW, NARROW), Block(NARROW, WIDE))
        self.head = nn.Linear(WIDE, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[batch, classes]`` of ``images`` ``[batch, side, side]``."""
        x = self.blocks(F.relu(self.norm(self.conv(images[:, None]))))
        logits: Tensor = self.head(x.mean((-2, -1)))
        return logits


@task("resnet")
class DigitsResNet(Digits):
    """19 thousand parameters, 18 thousand of them in four convolutions that are made sparse along their input channels.

    At 1:16 a group is all input channels of the first three and half of those of the last. 600 steps are 32 epochs; no weight decay and
    no clipping, as for ``mlp``. Evaluated with the running statistics of batch norm, as they are after the last step.
    """

    settings = Settings(
        steps=600,
        lr=1.7e-2,
        lr_sgd=0.3,
        weight_decay=0.0,
        clip=None,
        tuning_seeds=10,
        seeds=10,
        patterns=("1:8", "1:16"),
        without=("fst", "fst-nm", "slope"),
        seconds=8.0,
    )
    tokens = BATCH
    shares: ClassVar[dict[str, float]] = {"blocks.0": SIDE**2, "blocks.1": SIDE**2 / 4}

    def model(self) -> nn.Module:
        return ResNet()
