"""A GPU that is not there: what is asked for on ``cuda`` lies on the CPU, and the device's clock is the host's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from bench.cases import _ours

NAME = "NVIDIA H200"


class OnTheCpu(TorchFunctionMode):
    """Tensors asked for on cuda are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if str(given.get("device", "")).startswith("cuda"):
            given["device"] = "cpu"
        return func(*args, **given)


class HostEvent:
    """Of a device that works while it is called."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: HostEvent) -> float:
        return 1e3 * (end.at - self.at)


@contextmanager
def _captured(device: str) -> Iterator[Any]:
    yield SimpleNamespace(replay=lambda: None)


@contextmanager
def gpu(monkeypatch: pytest.MonkeyPatch, cache: int = 1 << 12) -> Iterator[None]:
    """Inside, ``cuda`` names a GPU with an L2 of ``cache`` bytes."""
    normal: Callable[..., torch.Tensor] = _ours.normal
    monkeypatch.setattr(_ours, "normal", lambda *shape, device, **more: normal(*shape, device="cpu", **more))
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr("bench.cases.host.captured", _captured)
    monkeypatch.setattr("bench.runner.matmul_rate", lambda dtype, device: 1e9)
    monkeypatch.setattr("bench.runner.lost", lambda device: "")
    monkeypatch.setattr("bench.rows.machine", lambda device="cpu": NAME)
    monkeypatch.setattr("bench.runner.machine_name", lambda device="cpu": NAME)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    for module in ("gemm", "linear", "layer", "quantized"):
        monkeypatch.setattr(f"bench.cases.{module}.last_level_cache", lambda device: cache)
    monkeypatch.setattr("bench.cases.power_or_port.uuid", lambda device: "GPU-1")
    monkeypatch.setattr("bench.cases.power_or_port.HEAT", 0.0)
    with OnTheCpu():
        yield
