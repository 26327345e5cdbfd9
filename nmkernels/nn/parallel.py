"""Layers whose weight tensor parallelism splits (``ColwiseParallel``, ``RowwiseParallel``): each rank multiplies its part of W̃.

Groups lie along ``in``. Column parallel splits ``out``, row parallel ``in`` between groups; W̃ of a part is then that part of the whole W̃.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..pattern import ShapeError
from ..shards import is_sharded
from .gather import gathered

if TYPE_CHECKING:
    from .linear import NMWeight

OUT, IN, NOTHING = "out", "in", ""


def check_mesh(where: str, weight: Any, data: int = 0) -> None:
    """Raise ``ShapeError`` where tensor parallelism has the DTensor ``weight`` on several dimensions of a mesh, beside ``data`` others."""
    mesh = weight.device_mesh
    if mesh.ndim - data > 1:
        raise ShapeError(
            f"{where}: tensor parallelism has the weight on {mesh.ndim - data} dimensions of {mesh}. Give parallelize_module a mesh "
            'of one, mesh["tp"]; fully_shard takes the others.'
        )


def check_input(layer: nn.Module, x: Tensor) -> None:
    """Raise ``ShapeError`` unless ``x`` is a DTensor."""
    if not is_sharded(x):
        raise ShapeError(
            f"{type(layer).__name__}: its weight is sharded, and the input is a plain tensor. Call the whole model, whose hooks gather the "
            "weight (fully_shard) or make a DTensor of the input (parallelize_module), and not the layer."
        )


def split_along(weight: Any, reduced: int) -> str:
    """What tensor parallelism splits of the DTensor ``weight``: ``"out"`` (column parallel), ``"in"`` (row parallel), ``""`` neither."""
    (placement,) = weight.placements
    if placement.is_replicate():
        return NOTHING
    return IN if placement.is_shard(reduced) else OUT


def split_linear(x: Any, mesh: Any, along: str, out: int, bias: Any, multiply: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
    """y = x Wᵀ + b as a DTensor on ``mesh``, of DTensors x ``(..., in)`` and b, and a weight ``(out, in)`` that is split ``along`` a side.

    Column parallel takes the whole x and gives a split y; row parallel takes a split x and gives y as a sum over the ranks (``Partial``).
    ``multiply`` is x Wᵀ + b for what this rank has of each.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    last = Shard(x.dim() - 1)
    wanted = last if along == IN else Replicate()
    if x.placements != (wanted,):  # where nothing is to do, the backward of it would reduce ∂L/∂x whole, not scattered
        x = x.redistribute(mesh, [wanted])
    if bias is not None:
        bias = bias.redistribute(mesh, [Shard(0) if along == OUT else Replicate()]).to_local()
        if along == IN and mesh.get_local_rank() != 0:
            bias = bias - bias.detach()  # one of the terms of a sum has it, and all have its gradient
    # column parallel: each rank has a part of the sum that is ∂L/∂x
    y = multiply(x.to_local(grad_placements=[Partial() if along == OUT else wanted]), bias)
    shape = torch.Size((*x.shape[:-1], out))
    stride = torch.empty(shape, device="meta").stride()  # told, since parts may be of unequal sizes
    given = {OUT: last, IN: Partial(), NOTHING: Replicate()}[along]
    result: Tensor = DTensor.from_local(y.contiguous(), mesh, [given], run_check=False, shape=shape, stride=stride)
    return result


def tensor_parallel(layer: NMWeight, x: Tensor) -> Tensor:
    """y = x W̃ᵀ + b as a DTensor, of the DTensor x and a weight that lies on a one-dimensional mesh."""
    weight: Any = layer.weight
    check_input(layer, x)
    check_mesh(type(layer).__name__, weight)
    along = split_along(weight, layer.reduced)
    layer.take_buffers()

    def multiply(inner: Tensor, bias: Tensor | None) -> Tensor:
        if layer.parameter is layer.weight:
            return layer._multiply(inner, weight.to_local(), None, bias, layer.plan)
        return layer._multiply(inner, *gathered(layer, inner), bias, layer.plan.dense_layout)

    return split_linear(x, weight.device_mesh, along, layer.shape[0], layer.bias, multiply)
