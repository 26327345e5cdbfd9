"""Scikit-learn's handwritten digits, 8 × 8 pixels: the data of the image tasks."""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..spec import TUNING_SEEDS
from .base import Task, generator, library, to_model

SIDE, CLASSES = 8, 10
BATCH = 64
TRAIN, TEST, HELD_OUT = 1200, 597, 300
"""Training and test images, of 1797, the same for every seed; the last 300 training images are for the search of learning rates."""


class Digits(Task):
    """1200 training and 597 test images. Training images are shifted by up to a pixel and noisy, so that they are not memorised.

    Learning rates are not chosen on the test set: a run on a tuning seed trains on 900 of the training images and is evaluated on the other
    300; a run on an evaluation seed trains on all 1200 and is evaluated on the test set.
    """

    def __init__(self) -> None:
        digits = library(self.name, "sklearn.datasets", "scikit-learn").load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32) / 8 - 1
        labels = torch.tensor(digits.target, dtype=torch.long)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        self.images, self.labels = images[order[:TRAIN]], labels[order[:TRAIN]]
        self.test_images, self.test_labels = images[order[TRAIN:]], labels[order[TRAIN:]]
        self.padded = F.pad(self.images, (1, 1, 1, 1), value=-1.0)
        self.digest = hashlib.blake2b(images[order].numpy().tobytes(), digest_size=8).hexdigest()

    def batch(self, seed: int, step: int) -> tuple[Tensor, ...]:
        rng = generator(seed, step)
        which = torch.randint(TRAIN - HELD_OUT if seed in TUNING_SEEDS else TRAIN, (BATCH,), generator=rng)
        shift = torch.randint(3, (BATCH, 2, 1), generator=rng)
        noise = 0.1 * torch.randn(BATCH, SIDE, SIDE, generator=rng)
        rows, cols = (shift[:, i] + torch.arange(SIDE) for i in (0, 1))
        shifted = self.padded[which[:, None, None], rows[:, :, None], cols[:, None, :]]
        return shifted + noise, self.labels[which]

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    @torch.no_grad()
    def evaluate(self, model: nn.Module, tuning: bool = False) -> dict[str, float]:
        images, labels = (self.images[-HELD_OUT:], self.labels[-HELD_OUT:]) if tuning else (self.test_images, self.test_labels)
        images, labels = to_model(model, images, labels)
        logits = model(images)
        right = (logits.argmax(-1) == labels).double().mean()
        return {"val_loss": F.cross_entropy(logits, labels).item(), "accuracy": 100 * right.item()}
