"""A model with every kind of entry that a file has; a file read whole, and written again with something changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import nmkernels as nm

Edit = Callable[[dict[str, Tensor], dict[str, str]], object]


def parts(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118


def edited(path: Path, edit: Edit) -> Path:
    tensors, metadata = parts(path)
    edit(tensors, metadata)
    save_file(tensors, path, metadata)
    return path


def layers(old: str, new: str) -> Edit:
    """The table of layers with other words in it."""
    return lambda tensors, metadata: metadata.update(layers=metadata["layers"].replace(old, new))


class Net(nn.Module):
    """Every kind of entry that a file has: compressed layers, one with integers, a convolution, an adapter, an order of columns, a layer
    and a weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 24)
        self.norm = nn.LayerNorm(24)
        self.a = nn.Linear(24, 12)
        self.b = nn.Linear(12, 24, bias=False)
        self.again = self.a
        self.c = nn.Linear(24, 4)
        self.d = nn.Linear(24, 4)
        self.conv = nn.Conv2d(8, 4, (3, 1))
        self.head = nn.Linear(24, 6, bias=False)
        self.head.weight = self.embed.weight


def saved(path: Path) -> bytes:
    """The compressed file of one."""
    generator, net = torch.Generator().manual_seed(0), Net()
    for p in net.parameters():
        nn.init.normal_(p, generator=generator)
    adapter = torch.randn(24, 2, generator=generator), torch.randn(2, 12, generator=generator)
    net.a = net.again = nm.CompressedLinear(nm.ops.compress(net.a.weight.detach(), "2:3"), net.a.bias, adapter=adapter)
    net.b = nm.CompressedLinear(nm.ops.compress(net.b.weight.detach(), "2:4"))
    columns = torch.randperm(24, generator=generator)
    net.c = nm.CompressedLinear(nm.ops.compress(net.c.weight.detach(), "1:8"), net.c.bias, columns=columns)
    rounded = nm.ops.quantize_values(nm.ops.compress(net.d.weight.detach(), "1:8"), "int4", 8)
    net.d = nm.CompressedLinear(rounded, net.d.bias)
    kernel = net.conv.weight.detach().permute(0, 2, 3, 1).reshape(4, 24)
    net.conv = nm.nn.CompressedConv2d(nm.ops.compress(kernel, "2:4"), (3, 1), net.conv.bias)
    nm.save_compressed(net, path)
    return path.read_bytes()
