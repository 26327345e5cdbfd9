"""A sparse layer whose weight tensor parallelism splits (``ColwiseParallel``, ``RowwiseParallel``): each rank multiplies its shard's W̃.

Groups lie along ``in``. Column parallel splits ``out``, row parallel ``in`` between groups; W̃ of a shard is then that part of the whole W̃.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..pattern import ShapeError
from .gather import gathered

if TYPE_CHECKING:
    from .linear import NMWeight


def splits_in(layer: NMWeight, weight: Any) -> bool:
    """Whether the weight is split along ``in`` (row parallel)."""
    return any(placement.is_shard(0 if layer.transposed else 1) for placement in weight.placements)


def tensor_parallel(layer: NMWeight, x: Tensor) -> Tensor:
    """y = x W̃ᵀ + b as a DTensor, of the DTensor x and a weight that lies on a one-dimensional mesh."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    weight: Any = layer.weight
    if not isinstance(x, DTensor):
        raise ShapeError(
            "SparseLinear: its weight is sharded, and the input is a plain tensor. Call the whole model, whose hooks gather the weight "
            "(fully_shard) or shard the input (parallelize_module), and not the layer."
        )
    mesh = weight.device_mesh
    if mesh.ndim != 1:
        raise ShapeError(f"SparseLinear: tensor parallelism over the {mesh.ndim} dimensions of {mesh} is not supported; use one.")
    last, row = x.dim() - 1, splits_in(layer, weight)
    whole = weight.placements[0].is_replicate()
    wanted = Shard(last) if row else Replicate()
    x = x.redistribute(mesh, [wanted])
    # column parallel: each rank has a part of the sum that is ∂L/∂x
    inner: Tensor = x.to_local(grad_placements=[wanted if row or whole else Partial()])
    pair: tuple[Tensor, Any] = (weight.to_local(), None) if layer.parameter is layer.weight else gathered(layer, inner)
    y = DTensor.from_local(
        layer._multiply(inner, *pair, None, layer.plan.dense_layout),
        mesh,
        [Partial() if row else Replicate() if whole else Shard(last)],
        run_check=False,
    )
    return y if layer.bias is None else y + layer.bias  # after: a sum over ranks would count it several times
