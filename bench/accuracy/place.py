"""Where runs are done: the CPU, a GPU, or several processes under torchrun."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .rows import RunRow

PARALLEL = ("", "ddp", "fsdp")

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """A device, alone or as one of several.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        bf16: compute in bfloat16 where autocast does; with FSDP2 everywhere but in the loss, since it gathers bfloat16 weights.
        parallel: with several processes, ``"ddp"`` or ``"fsdp"`` (FSDP2); the batch of a step is divided among them.
    """

    device: str = "cpu"
    bf16: bool = False
    parallel: str = ""

    def enter(self) -> Place:
        """Join the other processes, if there are any; ``leave`` undoes it.

        Raises:
            ValueError: there is no GPU; or there are several processes, and how they share a model is not stated.
        """
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: torch finds no GPU here")
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return replace(self, parallel="")
        if not self.parallel:
            raise ValueError("several processes: say --parallel ddp or --parallel fsdp")
        if self.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if not dist.is_initialized():
            dist.init_process_group("nccl" if self.device == "cuda" else "gloo")
        return self

    def leave(self) -> None:
        """Leave the other processes."""
        if self.parallel and dist.is_initialized():
            dist.destroy_process_group()

    @property
    def count(self) -> int:
        """The number of processes."""
        return dist.get_world_size() if self.parallel else 1

    @property
    def first(self) -> bool:
        """Whether this process writes and prints."""
        return not self.parallel or dist.get_rank() == 0

    def agree(self, value: T) -> T:
        """The first process's value, on all processes; it waits for them."""
        if not self.parallel:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def move(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The batch on this device."""
        return tuple(t.to(self.device) for t in batch)

    def parts(self, batch: tuple[Tensor, ...], most: int | None = None) -> list[tuple[Tensor, ...]]:
        """This process's share of the batch, in equal parts of at most ``most`` rows, not yet on this device.

        Raises:
            ValueError: the batch does not divide evenly, so that a mean of means would not be the mean.
        """
        rows = len(batch[0])
        if rows % self.count:
            raise ValueError(f"a batch of {rows} cannot be divided among {self.count} processes; start a number that divides {rows}")
        if self.parallel:
            batch = tuple(t[dist.get_rank() :: self.count] for t in batch)
            rows //= self.count
        if most is None or rows <= most:
            return [batch]
        if rows % most:
            raise ValueError(f"a share of {rows} rows cannot be divided into parts of {most}; start another number of processes")
        return list(zip(*(t.split(most) for t in batch), strict=True))

    def mean(self, loss: Tensor) -> float:
        """The loss, as a mean over processes."""
        value = loss.detach().float()
        if self.parallel:
            value = value.clone()  # float() may return the loss itself
            dist.all_reduce(value)
            value /= self.count
        return value.item()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model that is called in training; with FSDP2 the model itself, sharded in place: every block of a list, then the rest."""
        if self.parallel == "ddp":
            return nn.parallel.DistributedDataParallel(model)
        if self.parallel == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if self.bf16 else MixedPrecisionPolicy()
            mesh = init_device_mesh(self.device, (self.count,))
            lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
            for block in (block for part in reversed(lists) for block in part):  # inner blocks first, as fully_shard requires
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=replace(policy, output_dtype=torch.float32) if self.bf16 else policy)
            if hasattr(model, "translate"):  # a second entry point, which has to gather weights as forward does
                register_fsdp_forward_method(model, "translate")
        return model

    def autocast(self) -> AbstractContextManager[Any]:
        """For forward passes."""
        return torch.autocast(self.device, torch.bfloat16) if self.bf16 and self.parallel != "fsdp" else nullcontext()

    def clock(self) -> float:
        """CPU seconds of this process; on a GPU, elapsed seconds after its work is done."""
        if self.device != "cuda":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def row(self, row: RunRow) -> RunRow:
        """The row with this device as its machine: ``2 × NVIDIA H100 80GB HBM3, fsdp, bf16``."""
        name = torch.cuda.get_device_name() if self.device == "cuda" else row.machine
        count = f"{self.count} × " if self.parallel else ""
        words = [word for word in (self.parallel, "bf16" if self.bf16 else "") if word]
        if self.device == "cpu":  # a CPU's name ends with its instruction set
            return replace(row, machine=", ".join([*words, count + name]))
        return replace(row, machine=", ".join([count + name, *words]))


HERE = Place()
"""This process on the CPU."""
