"""The processes of a run, one or the ranks that torchrun starts, and how they share the model and the text.

Every rank runs the same program. Rank 0 alone writes and speaks; what it meets there the others are told, so that all go the same way.
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
"""What torch says where another process is gone."""


class World:
    """The ranks of a run; as a context manager it has them meet, and part at the end.

    Attributes:
        parallel: how the model is shared, of ``PARALLEL``.
        rank, ranks: which process this is, of how many.
        ways: over how many ranks the model is sharded.
        readers: how many share the text of a step; ``reader`` is this one's number.
        device: this rank's.
    """

    def __init__(self, parallel: str = "none", rank: int = 0, ranks: int = 1, ways: int = 1, device: str = "cpu") -> None:
        self.parallel, self.rank, self.ranks, self.ways, self.device = parallel, rank, ranks, ways, device
        self.sharded = parallel in ("fsdp", "hsdp", "tp")
        self.readers = 1 if parallel == "tp" else ranks
        self.reader = rank % self.readers
        self._store: Any = None
        self._parted: Any = None

    @classmethod
    def launched(cls, parallel: str, shard_ways: int | None, device: str) -> World:
        """This process among those that torchrun started, or alone.

        Raises:
            NMError: ``parallel`` does not fit the way in which the process was started, or ``shard_ways`` or ``device`` do not fit either.
        """
        started, rank, ranks = "RANK" in os.environ, int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if parallel != "hsdp" and shard_ways is not None:
            raise NMError(f"--shard-ways belongs to --parallel hsdp, and --parallel is {parallel}.")
        if parallel == "none" and started and ranks > 1:
            raise NMError(
                f"torchrun started {ranks} processes, and each would train the same model by itself. Say how they share the work, "
                "--parallel ddp, fsdp, hsdp or tp; or start without torchrun."
            )
        if parallel == "none":
            return cls(device=device)
        if not started:
            raise NMError(
                f"--parallel {parallel} needs the processes that torchrun starts: torchrun --nproc-per-node 2 -m nmkernels train "
                f"--parallel {parallel} ..."
            )
        ways = _shard_ways(shard_ways, ranks) if parallel == "hsdp" else 1 if parallel == "ddp" else ranks
        return cls(parallel, rank, ranks, ways, _gpu(device) if torch.device(device).type == "cuda" else device)

    def alone(self) -> World:
        """The same process and device with nobody else."""
        return World(device=self.device)

    @property
    def command(self) -> list[str]:
        """How to start the same processes again."""
        if self.parallel == "none":
            return [sys.executable, "-m", "nmkernels", "train"]
        each = int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks))
        nodes = ["--nnodes", str(self.ranks // each)] if each < self.ranks else []
        ways = ["--shard-ways", str(self.ways)] if self.parallel == "hsdp" else []
        return ["torchrun", *nodes, "--nproc-per-node", str(each), "-m", "nmkernels", "train", "--parallel", self.parallel, *ways]

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes and speaks."""
        return self.rank == 0

    @property
    def meets(self) -> bool:
        """Whether the ranks have met, and not parted yet."""
        return self._store is not None

    def __enter__(self) -> World:
        if self.parallel != "none":
            device = torch.device(self.device)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
            self._store = torch.distributed.distributed_c10d._get_default_store()
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is None:
            self.part()

    def part(self) -> None:
        """End the process group, once every rank has come here; nothing after ``fail``."""
        if self.meets:
            self._store = None
            torch.distributed.barrier()
            # kept: DistributedDataParallel's reducer, were it the last to let go of the group, would wait for the group's thread and hold
            # Python's lock, for which that thread waits (gloo, torch 2.13.0, 2026-11)
            self._parted = torch.distributed.group.WORLD
            torch.distributed.destroy_process_group()

    # ---- the model and the text

    def spread(self, model: GPT) -> Callable[[Tensor, Tensor], Tensor]:
        """Give each rank its part of ``model``, in place; what computes its loss as ``GPT.loss`` does."""
        if self.parallel == "ddp":
            from torch.nn.parallel import DistributedDataParallel

            adapters = any(hasattr(module, "nm_left") for module in model.modules())  # idle in a part of the run
            return DistributedDataParallel(_Loss(model), find_unused_parameters=adapters)
        if self.parallel in ("fsdp", "hsdp"):
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            kind = torch.device(self.device).type
            if self.parallel == "fsdp":
                mesh = init_device_mesh(kind, (self.ranks,))
            else:
                mesh = init_device_mesh(kind, (self.ranks // self.ways, self.ways), mesh_dim_names=("replicate", "shard"))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        if self.parallel == "tp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor import Replicate
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

            mesh = init_device_mesh(torch.device(self.device).type, (self.ranks,))
            plan = {
                # q, k and v are one matrix, whose parts are not those of heads: each rank attends with all of them
                "attn.qkv": ColwiseParallel(output_layouts=Replicate()),
                "attn.proj": RowwiseParallel(input_layouts=Replicate()),
                "mlp.fc": ColwiseParallel(),
                "mlp.proj": RowwiseParallel(),
            }
            for block in model.blocks:
                parallelize_module(block, mesh, plan)
        return model.loss

    def clip(self, model: GPT, most: float) -> None:
        """Scale the gradients so that their norm is at most ``most``."""
        if self.parallel != "tp":
            torch.nn.utils.clip_grad_norm_(model.parameters(), most)
            return
        # torch's takes either sharded tensors or plain ones, and here are both
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        parts = [part for kind in (True, False) if (part := [g for g in grads if is_sharded(g) is kind])]
        norm = torch.stack([whole(torch.nn.utils.get_total_norm(part)) for part in parts]).norm()
        factor = (most / (norm + 1e-6)).clamp(max=1.0)
        for g in grads:
            local(g).mul_(factor)

    def check(self, batch: int) -> None:
        """Raise ``NMError`` unless the ranks can share a batch of so many sequences evenly."""
        if batch % self.readers:
            raise NMError(f"--batch {batch} cannot be shared evenly by {self.readers} processes; make it a multiple of that.")

    def share(self, x: Tensor) -> Tensor:
        """This rank's rows of what one process would read; a few more or less than others' where that does not divide."""
        return x.tensor_split(self.readers)[self.reader]

    # ---- agreement

    def mean(self, *values: float) -> list[float]:
        """The mean of each value over the ranks."""
        return [value / self.ranks for value in self.sum(*values)]

    def sum(self, *values: float) -> list[float]:
        """The sum of each value over the ranks."""
        if not self.meets or not values:
            return list(values)
        row = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(row)
        found: list[float] = row.tolist()
        return found

    def lead(self, fn: Callable[[], T]) -> T:
        """``fn()`` of rank 0, where alone it is called. What it raises is raised on every rank."""
        if not self.meets:
            return fn()
        found: list[Any] = [None, None]
        if self.leads:
            try:
                found[0] = fn()
            except (NMError, OSError) as error:
                found[1] = error
        torch.distributed.broadcast_object_list(found)
        if found[1] is not None:
            raise found[1]
        result: T = found[0]
        return result

    def fail(self, text: str, status: int) -> int:
        """Say why the run ends, once where several ranks meet the same, and wait for nobody any more; ``status`` as it is."""
        first, store, self._store = self.leads, self._store, None
        if store is not None:
            with suppress(RuntimeError):  # it may have gone with rank 0
                first = store.add(f"nmkernels/{text}", 1) == 1
        if first:
            print(text, file=sys.stderr, flush=True)
        return status

    def explain(self, error: Exception) -> str | None:
        """A sentence for what torch raises where another rank is gone; None for any other error."""
        lost = isinstance(error, RuntimeError) and (isinstance(error, torch.distributed.DistError) or LOST.search(str(error)))
        said = "another process of this run has ended or does not answer; what it says for itself is the reason"
        return said if self.meets and lost else None


def _shard_ways(given: int | None, ranks: int) -> int:
    ways = given or int(os.environ.get("LOCAL_WORLD_SIZE", ranks))  # within a node
    if ranks % ways:
        raise NMError(f"--shard-ways {ways} does not divide the {ranks} processes.")
    if given is None and ways == ranks:
        raise NMError(
            f"--parallel hsdp shards within a node and replicates over nodes, and all {ranks} processes are on one. Give --shard-ways, a "
            "divisor of that, or take --parallel fsdp."
        )
    return ways


def _gpu(device: str) -> str:
    index = int(os.environ.get("LOCAL_RANK", 0))
    if torch.device(device).index is not None:
        raise NMError(f"--device {device}: each process takes a GPU of its own; say --device cuda.")
    if index >= torch.cuda.device_count():
        raise NMError(f"process {index} of this node has no GPU, there are {torch.cuda.device_count()}: start one process for each.")
    return f"cuda:{index}"


class _Loss(nn.Module):
    """The loss as a module: DistributedDataParallel wraps what is called."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model.loss(x, y)
