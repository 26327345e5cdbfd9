"""A task that trains in milliseconds, and a pool that runs in this process."""

from __future__ import annotations

import dataclasses
import io
import math
import tarfile
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.accuracy import runner, tasks, worker
from bench.accuracy.rows import RunRow
from bench.accuracy.spec import Case
from bench.accuracy.tasks import base


class Tiny(tasks.Task):
    """Regression with a linear layer of 16 inputs; ``seen`` records the batches."""

    settings = tasks.Settings(steps=50, lr=1e-2, clip=None, seconds=36)
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
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[Tiny]]:
    monkeypatch.setitem(base._tasks, "tiny", Tiny)
    monkeypatch.setattr(worker, "TRAINED", tmp_path_factory.mktemp("trained"))
    Tiny.name = "tiny"
    Tiny.seen, Tiny.first = [], []
    base.get.cache_clear()
    yield Tiny
    base.get.cache_clear()


def tar(files: dict[str, bytes], mode: str) -> bytes:
    """An archive, compressed by ``mode``."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def deb(path: Path, files: dict[str, bytes]) -> Path:
    """A Debian package."""
    members = [("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), ("data.tar.xz", tar(files, "w:xz"))]
    parts = [f"{name:16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(c):<10}`\n".encode() + c + b"\n" * (len(c) % 2) for name, c in members]
    path.write_bytes(b"!<arch>\n" + b"".join(parts))
    return path


def trained(task: tasks.Task, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Some steps on the batches of seed 0."""
    for step in range(steps):
        optimizer.zero_grad()
        task.loss(model, task.batch(0, step)).backward()
        optimizer.step()


def made(case: Case, lr: float, seed: int, loss: float, **more: object) -> RunRow:
    """A made-up row."""
    blank = {f.name: {"int": 0, "float": math.nan, "str": ""}[str(f.type)] for f in dataclasses.fields(RunRow)}
    status = "ok" if math.isfinite(loss) else "diverged"
    known = dict(blank, **vars(case), lr=lr, seed=seed, val_loss=loss, status=status, done=case.steps, seconds=36.0, data="x")
    return RunRow(**{**known, "training_flops": 1e6 if case.method == "dense" else 75e4, **more})  # type: ignore[arg-type]


@pytest.fixture
def inline() -> Iterator[Executor]:
    """A pool in this process."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
def unforked(inline: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the command run in this process, for builds of torch in which a fork of a process that has trained cannot train."""
    monkeypatch.setattr(runner, "processes", lambda workers: nullcontext(inline))
