"""Where runs are done: the CPU, a GPU, or several processes under torchrun."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .rows import RunRow

PARALLEL = ("", "ddp", "fsdp")


@dataclass(frozen=True)
class Place:
    """A device, alone or as one of several.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        bf16: autocast to bfloat16.
        parallel: with several processes, ``"ddp"`` or ``"fsdp"`` (FSDP2); the batch of a step is divided among them.
    """

    device: str = "cpu"
    bf16: bool = False
    parallel: str = ""

    def enter(self) -> Place:
        """Join the other processes, if there are any.

        Raises:
            ValueError: there are several processes, and it is not said how they share a model.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return replace(self, parallel="")
        if not self.parallel:
            raise ValueError("several processes: say --parallel ddp or --parallel fsdp")
        local = int(os.environ["LOCAL_RANK"])
        if self.device == "cuda":
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if self.device == "cuda" else "gloo")
        return self

    @property
    def first(self) -> bool:
        """Whether this process writes and prints."""
        return not self.parallel or dist.get_rank() == 0

    def move(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The batch on this device."""
        return tuple(t.to(self.device) for t in batch)

    def share(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """This process's share of the batch, on this device."""
        if self.parallel:
            batch = tuple(t[dist.get_rank() :: dist.get_world_size()] for t in batch)
        return self.move(batch)

    def mean(self, loss: Tensor) -> float:
        """The loss, as a mean over processes."""
        value = loss.detach().float()
        if self.parallel:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        return value.item()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model that is called in training; with FSDP2 the model itself, sharded in place."""
        if self.parallel == "ddp":
            return nn.parallel.DistributedDataParallel(model)
        if self.parallel == "fsdp":
            from torch.distributed.fsdp import fully_shard

            for part in model.modules():
                if isinstance(part, nn.ModuleList):
                    for block in part:
                        fully_shard(block)
            fully_shard(model)
        return model

    def autocast(self) -> AbstractContextManager[Any]:
        """For forward passes."""
        return torch.autocast(self.device, torch.bfloat16) if self.bf16 else nullcontext()

    def clock(self) -> float:
        """CPU seconds of this process; on a GPU, elapsed seconds after its work is done."""
        if self.device != "cuda":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def row(self, row: RunRow) -> RunRow:
        """The row with this device as its machine."""
        if self.device != "cuda":
            return row
        count = f"{dist.get_world_size()} × " if self.parallel else ""
        return replace(row, machine=f"{count}{torch.cuda.get_device_name()}" + (", bf16 autocast" if self.bf16 else ""))


HERE = Place()
"""This process on the CPU."""
