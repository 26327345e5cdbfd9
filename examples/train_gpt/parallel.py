"""The processes of a run: this one alone, or those that torchrun started; and how they share the model and the text."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
            adapters = any(name.endswith("nm_left") for name, _ in model.named_parameters())  # unused in part of a run
            return nn.parallel.DistributedDataParallel(model, find_unused_parameters=adapters)
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
