"""A task that trains in milliseconds, and a pool that runs in this process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.accuracy import tasks
from bench.accuracy.tasks import base


class Tiny(tasks.Task):
    """Regression with a linear layer of 16 inputs; ``seen`` records the batches."""

    settings = tasks.Settings(
        steps=50,
        lr=1e-2,
        start=(5e-3, 1e-2, 2e-2),
        start_sgd=(0.1, 0.2, 0.4),
        factor=2,
        methods=("dense", "ste", "srste", "step-25"),
        patterns=("2:4", "1:8"),
        variants=("step-10",),
        seconds=36,
    )
    tokens = 8
    seen: list[Tensor] = []
    first: list[Tensor] = []

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.first.append(model[0].weight.detach().clone())
        return model

    def batch(self, seed: int, step: int) -> tuple[Tensor, ...]:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * seed + step))
        self.seen.append(x)
        return (x,)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[0].roll(1, -1))

    @torch.no_grad()
    def evaluate(self, model: nn.Module, tuning: bool = False) -> dict[str, float]:
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(7))
        return {"val_loss": self.loss(model, (-x if tuning else x,)).item()}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Tiny]]:
    monkeypatch.setitem(base._tasks, "tiny", Tiny)
    Tiny.name = "tiny"
    Tiny.seen, Tiny.first = [], []
    base.get.cache_clear()
    yield Tiny
    base.get.cache_clear()


@pytest.fixture
def inline() -> Iterator[Executor]:
    """A pool in this process."""
    with ThreadPoolExecutor(1) as pool:
        yield pool
