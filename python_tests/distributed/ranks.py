"""Runs a function on several gloo processes, and gives back what each returned."""

from __future__ import annotations

import gc
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

needs_gloo = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch is built without gloo")


IMPORTED = [
    "nmkernels",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
]
"""What a rank has imported when it starts."""


def on_ranks(count: int, fn: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """``fn(*args)`` on ``count`` ranks of a process group; what each returned, in their order. An error on one of them is raised here.

    The ranks are forked from a server that has done the imports, which took four seconds a rank; it has the environment of its first call.
    """
    method = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
    mp.get_context(method).set_forkserver_preload(IMPORTED)
    mp.start_processes(_worker, (count, fn, dict(os.environ), str(folder), *args), count, start_method=method)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


def _worker(rank: int, count: int, fn: Callable[..., Any], environment: dict[str, str], folder: str, *args: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rendezvous = f"file://{folder}/rendezvous-{fn.__name__}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=count, timeout=timedelta(seconds=120))
    try:
        torch.save(fn(*args), Path(folder, f"{rank}.pt"))
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    # gloo's threads may abort an interpreter that takes itself down ("terminate called without an active exception", torch 2.13.0, 2026-11)
    sys.stdout.flush()
    os._exit(0)


class Conv1D(nn.Module):
    """As Hugging Face's: the weight is stored (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / 8), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


Conv1D.__module__ = "transformers.pytorch_utils"


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A state dict with every shard gathered."""
    return {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()}


def raised(fn: Callable[[], Any]) -> str:
    """What ``fn`` says when it fails; empty where it does not."""
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def assert_equal(what: str, got: Any, want: Any) -> None:
    """The weights, and the metrics of each step, of ``got`` are those of ``want``."""
    for key, value in want[0].items():
        assert (got[0][key] - value).abs().max() < 1e-10, (what, key)
    for step, (mine, theirs) in enumerate(zip(got[1], want[1], strict=True)):
        assert mine.keys() == theirs.keys(), what
        for name, value in theirs.items():
            assert mine[name] == pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True), (what, step, name)
