"""The processes of a run: one, or the ranks that torchrun starts. How they share the model, the text, and decisions.

Every rank runs the same program. Only rank 0 writes files and prints; errors that it meets there are raised on every rank.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..models import GPT
from ..pattern import NMError
from ..shards import is_sharded, local, whole

T = TypeVar("T")
PARALLEL = {
    "none": "one process",
    "ddp": "each rank has the whole model",
    "fsdp": "sharded over all ranks",
    "hsdp": "sharded within groups of --shard-ways ranks, replicated over them",
    "tp": "tensor parallel: each rank has a part of every matrix, all read the same text",
}
TIMEOUT = timedelta(minutes=10)
LOST = re.compile(r"gloo|nccl|connection (was )?(closed|reset)|socket|timed out", re.IGNORECASE)
"""Found in torch's error messages when another process has ended."""


class Ranks:
    """The ranks of a run; a context manager that starts the process group and ends it.

    Attributes:
        parallel: how the model is shared, a key of ``PARALLEL``.
        rank, count: the number of this process, and how many there are.
        shard_ways: the number of ranks over which the model is sharded.
        readers, reader: how many ranks share the text of a step, and this one's number among them.
        device: the device of this rank.
    """

    def __init__(self, parallel: str = "none", rank: int = 0, count: int = 1, shard_ways: int = 1, device: str = "cpu") -> None:
        self.parallel, self.rank, self.count, self.shard_ways, self.device = parallel, rank, count, shard_ways, device
        self.sharded = parallel in ("fsdp", "hsdp", "tp")
        self.readers = 1 if parallel == "tp" else count
        self.reader = rank % self.readers
        self._store: Any = None
        self._ended_group: Any = None

    @classmethod
    def launched(cls, parallel: str, shard_ways: int | None, device: str) -> Ranks:
        """The ranks that torchrun started, from its environment variables; or this process alone.

        Raises:
            NMError: ``parallel`` contradicts how the process was started, or ``shard_ways`` or ``device`` contradict ``parallel``.
        """
        started, rank, count = "RANK" in os.environ, int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if parallel != "hsdp" and shard_ways is not None:
            raise NMError(f"--shard-ways belongs to --parallel hsdp, and --parallel is {parallel}.")
        if parallel == "none" and started and count > 1:
            raise NMError(
                f"torchrun started {count} processes, and each would train the same model by itself. Say how they share the work, "
                "--parallel ddp, fsdp, hsdp or tp; or start without torchrun."
            )
        if parallel == "none":
            return cls(device=device)
        if not started:
            raise NMError(
                f"--parallel {parallel} needs the processes that torchrun starts: torchrun --nproc-per-node 2 -m nmkernels train "
                f"--parallel {parallel} ..."
            )
        ways = _shard_ways(shard_ways, count) if parallel == "hsdp" else 1 if parallel == "ddp" else count
        return cls(parallel, rank, count, ways, _gpu(device) if torch.device(device).type == "cuda" else device)

    def alone(self) -> Ranks:
        """This process as a run of its own, on the same device."""
        return Ranks(device=self.device)

    @property
    def command(self) -> list[str]:
        """The command that starts the same processes again."""
        if self.parallel == "none":
            return [sys.executable, "-m", "nmkernels", "train"]
        each = int(os.environ.get("LOCAL_WORLD_SIZE", self.count))
        nodes = ["--nnodes", str(self.count // each)] if each < self.count else []
        ways = ["--shard-ways", str(self.shard_ways)] if self.parallel == "hsdp" else []
        return ["torchrun", *nodes, "--nproc-per-node", str(each), "-m", "nmkernels", "train", "--parallel", self.parallel, *ways]

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    @property
    def connected(self) -> bool:
        """Whether the process group has started and has not ended yet."""
        return self._store is not None

    def __enter__(self) -> Ranks:
        if self.parallel != "none":
            device = torch.device(self.device)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
            self._store = torch.distributed.distributed_c10d._get_default_store()
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is None:
            self.disconnect()

    def disconnect(self) -> None:
        """End the process group once every rank has called this; does nothing after ``fail``."""
        if self.connected:
            self._store = None
            torch.distributed.barrier()
            # hold a reference: if DistributedDataParallel's reducer released the group last, it would wait for the group's thread while
            # holding the GIL, for which that thread waits (gloo, torch 2.13.0, 2026-11)
            self._ended_group = torch.distributed.group.WORLD
            torch.distributed.destroy_process_group()

    # ---- the model and the text

    def parallelize(self, model: GPT) -> Callable[[Tensor, Tensor], Tensor]:
        """Shard or wrap ``model`` for this rank, in place; returns the function that computes its loss as ``GPT.loss`` does."""
        if self.parallel == "ddp":
            from torch.nn.parallel import DistributedDataParallel

            adapters = any(hasattr(module, "nm_left") for module in model.modules())  # unused in part of the run
            return DistributedDataParallel(_Loss(model), find_unused_parameters=adapters)
        if self.parallel in ("fsdp", "hsdp"):
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            kind = torch.device(self.device).type
            if self.parallel == "fsdp":
                mesh = init_device_mesh(kind, (self.count,))
            else:
                mesh = init_device_mesh(kind, (self.count // self.shard_ways, self.shard_ways), mesh_dim_names=("replicate", "shard"))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        if self.parallel == "tp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor import Replicate
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

            mesh = init_device_mesh(torch.device(self.device).type, (self.count,))
            plan = {
                # q, k and v are one matrix, and its column blocks are not heads: each rank computes attention for all heads
                "attn.qkv": ColwiseParallel(output_layouts=Replicate()),
                "attn.proj": RowwiseParallel(input_layouts=Replicate()),
                "mlp.fc": ColwiseParallel(),
                "mlp.proj": RowwiseParallel(),
            }
            for block in model.blocks:
                parallelize_module(block, mesh, plan)
        return model.loss

    def clip_grad_norm(self, model: GPT, max_norm: float) -> None:
        """``torch.nn.utils.clip_grad_norm_`` over all ranks."""
        if self.parallel != "tp":
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            return
        # torch's function takes either sharded tensors or plain ones, and this model has both
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        parts = [part for kind in (True, False) if (part := [g for g in grads if is_sharded(g) is kind])]
        norm = torch.stack([whole(torch.nn.utils.get_total_norm(part)) for part in parts]).norm()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for g in grads:
            local(g).mul_(factor)

    def check_batch(self, batch: int) -> None:
        """Raise ``NMError`` unless the ranks can share a batch of ``batch`` sequences evenly."""
        if batch % self.readers:
            raise NMError(f"--batch {batch} cannot be shared evenly by {self.readers} processes; make it a multiple of that.")

    def own_rows(self, x: Tensor) -> Tensor:
        """This rank's rows of a batch; rank sizes differ by at most one row."""
        return x.tensor_split(self.readers)[self.reader]

    # ---- agreement

    def mean(self, *values: float) -> list[float]:
        """The mean of each value over the ranks."""
        return [value / self.count for value in self.sum(*values)]

    def sum(self, *values: float) -> list[float]:
        """The sum of each value over the ranks."""
        if not self.connected or not values:
            return list(values)
        row = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(row)
        sums: list[float] = row.tolist()
        return sums

    def on_main(self, fn: Callable[[], T]) -> T:
        """Call ``fn()`` on rank 0 only and return its result, or raise its error, on every rank."""
        if not self.connected:
            return fn()
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome[0] = fn()
            except (NMError, OSError) as error:
                outcome[1] = error
        torch.distributed.broadcast_object_list(outcome)
        if outcome[1] is not None:
            raise outcome[1]
        result: T = outcome[0]
        return result

    def fail(self, text: str, status: int) -> int:
        """Print why the run ends, once if several ranks fail for the same reason, leave the process group, and return ``status``."""
        first, store, self._store = self.is_main, self._store, None
        if store is not None:
            with suppress(RuntimeError):  # the store is gone if rank 0 has ended
                first = store.add(f"nmkernels/{text}", 1) == 1
        if first:
            print(text, file=sys.stderr, flush=True)
        return status

    def explain(self, error: Exception) -> str | None:
        """The message for an error that torch raises because another rank has ended; None for any other error."""
        lost = isinstance(error, RuntimeError) and (isinstance(error, torch.distributed.DistError) or LOST.search(str(error)))
        message = "another process of this run has ended or does not respond; its own message has the reason"
        return message if self.connected and lost else None


def _shard_ways(shard_ways: int | None, count: int) -> int:
    ways = shard_ways or int(os.environ.get("LOCAL_WORLD_SIZE", count))  # within a node
    if count % ways:
        raise NMError(f"--shard-ways {ways} does not divide the {count} processes.")
    if shard_ways is None and ways == count:
        raise NMError(
            f"--parallel hsdp shards within a node and replicates over nodes, and all {count} processes are on one. Give --shard-ways, a "
            "divisor of that, or take --parallel fsdp."
        )
    return ways


def _gpu(device: str) -> str:
    index = int(os.environ.get("LOCAL_RANK", 0))
    if torch.device(device).index is not None:
        raise NMError(f"--device {device}: each process uses its own GPU; pass --device cuda.")
    if index >= torch.cuda.device_count():
        raise NMError(f"process {index} of this node has no GPU, there are {torch.cuda.device_count()}: start one process for each.")
    return f"cuda:{index}"


class _Loss(nn.Module):
    """The loss as a module, because DistributedDataParallel wraps a module's ``forward``."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model.loss(x, y)
