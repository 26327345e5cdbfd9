"""The processes of a run, this one alone or those that torchrun started: how they share the model and the text, and their checkpoints.

Any number of processes can resume a checkpoint of torch.distributed.checkpoint, however they share the model. It is written into a hidden
folder, which is renamed once it is complete: a process may be killed at any moment, and the newest folder with a name of its own is a whole
checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from model import GPT

KINDS = {
    "none": "one process",
    "ddp": "each process has the whole model",
    "fsdp": "the model is sharded over all processes",
    "tp": "tensor parallel: each process has a part of every matrix, all read the same text",
}


class Ranks:
    """This process among ``count``, as torchrun's environment variables say, or alone if ``kind`` is none. Rank 0 prints and writes files.

    Attributes:
        readers, reader: how many processes share the text of a step, and this one's number among them.
    """

    def __init__(self, kind: str = "none", device: str = "cpu") -> None:
        self.kind, self.rank, self.count, self.device = kind, 0, 1, torch.device(device)
        if kind != "none":
            if self.device.type == "cuda":
                self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
                torch.cuda.set_device(self.device)
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
            # held to the end: if DistributedDataParallel released the group last, it would wait for a thread that waits for the GIL
            # (gloo, torch 2.13.0, 2026-11)
            self.group = dist.group.WORLD
            self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.readers = 1 if kind == "tp" else self.count
        self.reader = self.rank % self.readers

    def end(self) -> None:
        """End the process group; from then on this process is alone."""
        if self.kind != "none":
            dist.barrier()
            dist.destroy_process_group()

    def share(self, model: GPT) -> nn.Module:
        """Shard ``model`` in place; returns the module to call in training."""
        if self.kind == "ddp":
            return nn.parallel.DistributedDataParallel(model)
        if self.kind == "fsdp":
            from torch.distributed.fsdp import fully_shard

            mesh = dist.init_device_mesh(self.device.type, (self.count,))
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh)
        if self.kind == "tp":
            from torch.distributed.tensor import Replicate
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

            mesh = dist.init_device_mesh(self.device.type, (self.count,))
            # q, k and v are one matrix whose column blocks are not heads, so each process computes attention for all heads
            plan = {
                "attn.qkv": ColwiseParallel(output_layouts=Replicate()),
                "attn.proj": RowwiseParallel(input_layouts=Replicate()),
                "mlp.fc": ColwiseParallel(),
                "mlp.proj": RowwiseParallel(),
            }
            for block in model.blocks:
                parallelize_module(block, mesh, plan)
        return model

    def clip_gradients(self, model: GPT, most: float) -> None:
        """``torch.nn.utils.clip_grad_norm_`` over all processes."""
        if self.kind != "tp":
            torch.nn.utils.clip_grad_norm_(model.parameters(), most)
            return
        # torch's function takes sharded gradients or plain ones, and this model has both
        from torch.distributed.tensor import DTensor

        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms = [torch.linalg.vector_norm(g) for g in gradients]
        norm = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
        for g in gradients:
            g.mul_((most / (norm + 1e-6)).clamp(max=1.0))

    def rows(self, x: Tensor) -> Tensor:
        """This process's rows of a batch."""
        return x.tensor_split(self.readers)[self.reader].to(self.device)

    def sum(self, *values: float) -> list[float]:
        """The sum of each value over the processes."""
        if self.count == 1:
            return list(values)
        row = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(row)
        return row.tolist()

    def barrier(self) -> None:
        if self.count > 1:
            dist.barrier()


# ---- checkpoints

KEEP = 2
PROGRESS = "progress.json"
"""What is no tensor: the step, the time, the rows of the log."""


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """By the names of the dense model's parameters. What the recipe keeps is in the optimizer's state."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any], ranks: Ranks) -> None:
    """Write a checkpoint of the step ``progress["step"]``, all processes together, and remove all but the last ones."""
    path = folder / f"step-{progress['step']:08}"
    part = folder / f".{path.name}"
    dcp.save(_tensors(model, optimizer), checkpoint_id=part)
    if ranks.rank == 0:
        (part / PROGRESS).write_text(json.dumps(progress))
        part.rename(path)
        _clean(folder)
    ranks.barrier()


def _clean(folder: Path) -> None:
    """Remove all but the last checkpoints, and what is left of those that a killed process was writing or removing."""
    for old in sorted(folder.glob("step-*"))[:-KEEP]:
        old.rename(folder / f".{old.name}")
    for part in folder.glob(".step-*"):
        shutil.rmtree(part)


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> dict[str, Any] | None:
    """Load the newest checkpoint and return its ``progress``; None if there is none."""
    if ranks.rank == 0:
        _clean(folder)
    ranks.barrier()
    path = max(folder.glob("step-*"), default=None)
    if path is None:
        return None
    state = _tensors(model, optimizer)
    # a parameter that has had no gradient yet, as an adapter that is added late, has no state there
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    moments = state["optimizer"]["state"]
    for name in [name for name in moments if not any(key.startswith(f"optimizer.state.{name}.") for key in saved)]:
        del moments[name]
    dcp.load(state, checkpoint_id=path)
    options = StateDictOptions(strict=False)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options)
    progress: dict[str, Any] = json.loads((path / PROGRESS).read_text())
    return progress
