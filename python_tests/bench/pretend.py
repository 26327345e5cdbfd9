"""A GPU that is not there: what is asked for on ``cuda`` lies on the CPU, and the device's clock is the host's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from bench.cases import _ours
from nmkernels.tuning import timer

NAME = "NVIDIA H200"


class OnTheCpu(TorchFunctionMode):
    """Tensors asked for on cuda are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if str(given.get("device", "")).startswith("cuda"):
            given["device"] = "cpu"
        return func(*args, **given)


class HostClock:
    """A device that works while it is called."""

    def __init__(self, device: str = "cuda") -> None:
        pass

    def synchronize(self) -> None:
        pass

    def sleep(self, seconds: float) -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter()

    def reached(self, mark: float) -> bool:
        return False

    def between(self, start: float, end: float) -> float:
        return end - start


class _Graph:
    def replay(self) -> None:
        pass


@contextmanager
def _captured(device: str) -> Iterator[_Graph]:
    yield _Graph()


@contextmanager
def gpu(monkeypatch: pytest.MonkeyPatch, cache: int = 1 << 12) -> Iterator[None]:
    """Inside, ``cuda`` names a GPU with an L2 of ``cache`` bytes."""
    normal: Callable[..., torch.Tensor] = _ours.normal
    monkeypatch.setattr(_ours, "normal", lambda *shape, device, **more: normal(*shape, device="cpu", **more))
    monkeypatch.setattr(timer, "Cuda", HostClock)
    monkeypatch.setattr("bench.cases.host.captured", _captured)
    monkeypatch.setattr("bench.runner.matmul_rate", lambda dtype, device: 1e9)
    monkeypatch.setattr("bench.runner.lost", lambda device: "")
    monkeypatch.setattr("bench.rows.machine", lambda device="cpu": NAME)
    monkeypatch.setattr("bench.runner.machine_name", lambda device="cpu": NAME)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    for module in ("gemm", "linear", "layer"):
        monkeypatch.setattr(f"bench.cases.{module}.last_level_cache", lambda device: cache)
    with OnTheCpu():
        yield
