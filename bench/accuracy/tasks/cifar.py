"""CIFAR-10 with a vision transformer; needs the data set: ``NMKERNELS_CIFAR10=folder of cifar-10-batches-py``."""

from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Settings, Task, task
from .vit import ViT

VARIABLE = "NMKERNELS_CIFAR10"
SIDE, PATCH = 32, 4
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Mean and deviation of the training images' red, green and blue."""

BATCH = 128


class PictureViT(ViT):
    """Vision transformer over patches of 4 × 4 pixels in colour."""

    count, size, deviation = (SIDE // PATCH) ** 2, 3 * PATCH * PATCH, 0.02

    def __init__(self, width: int = 192, layers: int = 6, heads: int = 6) -> None:
        super().__init__(width, layers, heads)

    def patches(self, images: Tensor) -> Tensor:
        n = SIDE // PATCH
        return images.view(-1, 3, n, PATCH, n, PATCH).permute(0, 2, 4, 1, 3, 5).reshape(-1, self.count, self.size)


@task("cifar10")
class Cifar10(Task):
    """50 thousand images, 51 epochs in 20 thousand steps, mirrored and shifted by up to four pixels; a day on a laptop, an hour on a GPU.

    Raises:
        RuntimeError: ``NMKERNELS_CIFAR10`` does not name the folder, or a file in it is missing.
    """

    settings = Settings(steps=20_000, lr=1e-3, seconds=80_000)
    tokens = BATCH * (SIDE // PATCH) ** 2
    shares: ClassVar[dict[str, float]] = {"head": (PATCH / SIDE) ** 2}

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
        return PictureViT()

    def batch(self, seed: int, step: int) -> tuple[Tensor, ...]:
        rng = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + step) & (2**63 - 1))
        which = torch.randint(len(self.images), (BATCH,), generator=rng)
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
        losses, right = 0.0, 0
        for images, labels in zip(self.test_images.split(256), self.test_labels.split(256), strict=True):
            logits = model(_normal(images))
            losses += F.cross_entropy(logits, labels, reduction="sum").item()
            right += int((logits.argmax(-1) == labels).sum())
        count = len(self.test_labels)
        return {"val_loss": losses / count, "accuracy": 100 * right / count}

    def data(self) -> str:
        return self.digest


def _normal(images: Tensor) -> Tensor:
    mean, deviation = (torch.tensor(v).view(3, 1, 1) for v in (MEAN, DEVIATION))
    return (images.float() / 255 - mean) / deviation


def _read(file: Path) -> tuple[Tensor, Tensor]:
    """Images uint8 ``[n, 3, 32, 32]`` and classes of one file of the data set."""
    with file.open("rb") as stream:
        content = pickle.load(stream, encoding="bytes")  # the format in which the data set is published
    return torch.from_numpy(np.asarray(content[b"data"]).reshape(-1, 3, SIDE, SIDE).copy()), torch.tensor(content[b"labels"])
