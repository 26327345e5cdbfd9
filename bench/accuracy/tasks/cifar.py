"""ResNet-18 on CIFAR-10: ``cifar10``, for owners of a GPU.

``NMKERNELS_CIFAR10`` is the folder ``cifar-10-batches-py`` of the data set's Python version. Nothing is downloaded.

    NMKERNELS_CIFAR10=folder python -m bench.accuracy run --tasks cifar10 --methods dense step-10 --device cuda --bf16 --out mine

The model and data of STEP's first experiments (Lu et al., ICML 2023), which take Adam's default β = (0.9, 0.999); batches of 128, 200
epochs, weight decay 5e-4, mirrored and shifted by up to four pixels, as is usual for this model. The rate is searched.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..spec import TUNING_SEEDS
from .base import Settings, Task, generator, task, to_model

VARIABLE = "NMKERNELS_CIFAR10"
SIDE, CLASSES = 32, 10
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Mean and deviation of the training images' red, green and blue."""

BATCH, EPOCHS = 128, 200
HELD_OUT = 5000
"""The last training images, for the search of learning rates."""


class Block(nn.Module):
    """Two 3 × 3 convolutions with batch norm around which the input is added, through a 1 × 1 convolution where the shape changes."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` ``[batch, inputs, side, side]`` to ``[batch, channels, side / stride, side / stride]``."""
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 (He et al., CVPR 2016) for small pictures: a first convolution of 3 × 3 with stride 1, and no pooling after it.

    Args:
        width: channels of the first of the four stages; each has twice as many as the one before.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.ModuleList(
            nn.Sequential(Block(inputs, channels, 1 if channels == inputs else 2), Block(channels, channels, 1))
            for inputs, channels in pairwise(widths)
        )
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[batch, classes]`` of ``images`` ``[batch, 3, side, side]``."""
        x = F.relu(self.norm(self.conv(images)))
        for stage in self.stages:
            x = stage(x)
        logits: Tensor = self.head(x.mean((-2, -1)))
        return logits


@task("cifar10")
class Cifar10(Task):
    """11.2 million parameters, nearly all in convolutions that are made sparse along their input channels; the first convolution, which has
    three input channels, and the head stay dense.

    A run on a tuning seed trains on 45,000 of the training images and is evaluated on the other 5,000; a run on an evaluation seed trains
    on all 50,000 and is evaluated on the test set. Under torchrun each process has the batch statistics of its own share.

    Raises:
        RuntimeError: ``NMKERNELS_CIFAR10`` does not name the folder, or a file in it is missing.
    """

    settings = Settings(
        steps=EPOCHS * 50_000 // BATCH,
        lr=1e-3,
        weight_decay=5e-4,
        floor=0.0,
        clip=None,
        patterns=("2:4", "1:8"),
        without=("fst", "fst-nm", "slope"),
        seconds=1800,
    )
    tokens = BATCH
    shares: ClassVar[dict[str, float]] = {f"stages.{i}": (SIDE >> i) ** 2 for i in range(4)}

    def __init__(self) -> None:
        folder = Path(os.environ.get(VARIABLE) or "nowhere")
        files = [folder / f"data_batch_{i}" for i in range(1, 6)] + [folder / "test_batch"]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise RuntimeError(
                f"the task 'cifar10' reads the folder that {VARIABLE} names ({folder}) and does not find {', '.join(missing)} there; "
                "download the Python version of CIFAR-10, unpack it, and set the variable to cifar-10-batches-py."
            )
        parts = [_read(file) for file in files]
        self.images, self.labels = (torch.cat([part[i] for part in parts[:-1]]) for i in (0, 1))
        self.test_images, self.test_labels = parts[-1]
        self.digest = hashlib.blake2b(self.images.numpy().tobytes(), digest_size=8).hexdigest()

    def model(self) -> nn.Module:
        return ResNet18()

    def batch(self, seed: int, step: int) -> tuple[Tensor, ...]:
        rng = generator(seed, step)
        count = len(self.images) - (HELD_OUT if seed in TUNING_SEEDS else 0)
        which = torch.randint(count, (BATCH,), generator=rng)
        shift = torch.randint(9, (BATCH, 2, 1), generator=rng)
        mirrored = torch.randint(2, (BATCH, 1, 1, 1), generator=rng).bool()
        images = _normal(self.images[which])
        padded = F.pad(torch.where(mirrored, images.flip(-1), images), (4, 4, 4, 4))
        rows, cols = (shift[:, i] + torch.arange(SIDE) for i in (0, 1))
        shifted = padded[torch.arange(BATCH)[:, None, None], :, rows[:, :, None], cols[:, None, :]]
        return shifted.permute(0, 3, 1, 2), self.labels[which]

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(model(batch[0].contiguous()), batch[1])

    @torch.no_grad()
    def evaluate(self, model: nn.Module, tuning: bool = False) -> dict[str, float]:
        images, labels = (self.images[-HELD_OUT:], self.labels[-HELD_OUT:]) if tuning else (self.test_images, self.test_labels)
        losses, right = 0.0, 0
        for some, theirs in zip(images.split(256), labels.split(256), strict=True):
            x, y = to_model(model, _normal(some), theirs)
            logits = model(x)
            losses += F.cross_entropy(logits, y, reduction="sum").item()
            right += int((logits.argmax(-1) == y).sum())
        return {"val_loss": losses / len(labels), "accuracy": 100 * right / len(labels)}


def _normal(images: Tensor) -> Tensor:
    mean, deviation = (torch.tensor(v).view(3, 1, 1) for v in (MEAN, DEVIATION))
    return (images.float() / 255 - mean) / deviation


def _read(file: Path) -> tuple[Tensor, Tensor]:
    """Images uint8 ``[n, 3, 32, 32]`` and classes of one file of the data set."""
    with file.open("rb") as stream:
        content = pickle.load(stream, encoding="bytes")  # the format in which the data set is published
    return torch.from_numpy(np.asarray(content[b"data"]).reshape(-1, 3, SIDE, SIDE).copy()), torch.tensor(content[b"labels"])
