"""A fake GPU: tensors on ``cuda`` are made on the CPU, and events read the host's clock."""

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


class CpuForCuda(TorchFunctionMode):
    """Makes tensors on the CPU where a function is asked for ``cuda``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = dict(kwargs or {})
        if str(keywords.get("device", "")).startswith("cuda"):
            keywords["device"] = "cpu"
        return func(*args, **keywords)


class HostEvent:
    """A CUDA event of a device that runs synchronously."""

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
def fake_gpu(monkeypatch: pytest.MonkeyPatch, cache: int = 1 << 12) -> Iterator[None]:
    """Inside, ``cuda`` is a fake GPU with an L2 of ``cache`` bytes."""
    normal: Callable[..., torch.Tensor] = _ours.normal
    monkeypatch.setattr(_ours, "normal", lambda *shape, device, **more: normal(*shape, device="cpu", **more))
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    for module in ("ffn", "host", "model"):
        monkeypatch.setattr(f"bench.cases.{module}.graphed", lambda call, device, pool=None: call)
    monkeypatch.setattr("bench.runner.matmul_rate", lambda dtype, device: 1e9)
    monkeypatch.setattr("bench.runner.lost", lambda device: "")
    monkeypatch.setattr("bench.rows.machine", lambda device="cpu": NAME)
    monkeypatch.setattr("bench.runner.machine_name", lambda device="cpu": NAME)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    for module in ("gemm", "integers", "linear", "layer", "quantized"):
        monkeypatch.setattr(f"bench.cases.{module}.last_level_cache", lambda device: cache)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1"))
    monkeypatch.setattr("bench.cases.power_or_port.HEAT", 0.0)
    with CpuForCuda():
        yield
