"""Writing a sharded model: tensors are gathered one by one on the first rank, which writes the file."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..layouts import CONV1D, REDUCED
from ..nn.compressed import CompressedLinear
from ..nn.weight import NMWeight
from ..pattern import CheckpointError, NMError, RecipeError
from ..reference.compress import pack_indices, unpack_indices
from ..shards import is_sharded, local, whole
from .tensors import aliases_of, write


class Gatherer:
    """Gathers the sharded tensors of ``model`` on one rank and writes them; for a model without sharded tensors, in this process.

    Attributes:
        first: whether this is the rank that keeps the gathered tensors and writes.
    """

    def __init__(self, model: nn.Module) -> None:
        meshes = [value.device_mesh for value in model.state_dict().values() if isinstance(value, Tensor) and is_sharded(value)]  # type: ignore[attr-defined]
        # with FSDP2 and tensor parallelism some tensors are on a submesh
        self.mesh: Any = max(meshes, key=lambda mesh: mesh.size(), default=None)
        self.first = self.mesh is None or not any(self.mesh.get_coordinate())

    def raise_together(self, problem: str, kind: type[NMError] = RecipeError) -> None:
        """Raise ``kind`` on every rank if any rank has a ``problem``; the other ranks would wait for that one forever."""
        problems = [problem]
        for group in () if self.mesh is None else self.mesh.get_all_groups():
            rows: list[Any] = [None] * group.size()
            torch.distributed.all_gather_object(rows, problems, group=group)
            problems = [text for row in rows for text in row]
        for text in problems:
            if text:
                raise kind(text)

    def packed(self, layer: NMWeight) -> ops.Compressed:
        """The whole compressed weight ``(out, in)`` of a finished layer on the first rank; on the meta device on the others."""
        return _gathered(layer).to("cpu" if self.first else "meta")

    def dense(self, layer: CompressedLinear) -> Tensor:
        """The whole weight ``(out, in)`` in dense layout on the first rank; on the meta device on the others."""
        if self.mesh is None:
            return layer.dense()
        # in the state dict, parts of a weight are DTensors
        state = {name: whole(part) for name, part in layer.state_dict().items() if name in ("values", "indices", "step")}
        if not self.first:
            return torch.empty(layer.whole_shape, dtype=layer.dtype, device="meta")
        weight = ops.Compressed(state["values"], state["indices"], layer.pattern, layer.whole_shape, state.get("step"))
        dense, order = weight.to("cpu").dense(layer.dtype), layer.order
        return dense if order is None else dense.index_select(1, order.cpu().long().argsort())

    def write(
        self,
        path: str | os.PathLike[str],
        tensors: dict[str, Tensor],
        metadata: dict[str, str],
        describe_aliases: Callable[[dict[str, str]], dict[str, str]],
    ) -> None:
        """Gather ``tensors`` and write them. Aliases are not gathered; ``describe_aliases`` turns them into metadata.

        Raises:
            CheckpointError: on every rank, if the first could not write.
        """
        # the first rank decides which tensors are tied: that is found by memory, which an empty shard has none of
        aliases = aliases_of(tensors)
        ready: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            gathered = whole(tensor)
            if name not in aliases and self.first:
                ready[name] = gathered.cpu() if is_sharded(tensor) else tensor
        problem = ""
        if self.first:
            try:
                write(path, ready, {**metadata, **(describe_aliases(aliases) if aliases else {})})
            except CheckpointError as error:
                if self.mesh is None:
                    raise
                problem = str(error)
        self.raise_together(problem, CheckpointError)


def _gathered(layer: NMWeight) -> ops.Compressed:
    """The whole compressed weight of a finished layer; if it is sharded, each rank compresses its part, and those are gathered."""
    with torch.no_grad():
        part = layer.as_pruned() or ops.compress(layer.grouped.detach(), layer.pattern)
    weight: Any = layer.parameter
    if not is_sharded(weight):
        return part
    from torch.distributed.tensor import DTensor

    (rows, cols), p = layer.shape, layer.pattern
    # if shards split the columns, their index bytes may not fit together
    splits = any(placement.is_shard(REDUCED[layer.layout]) for placement in weight.placements)
    tensors = [part.values, unpack_indices(part.indices, p.index_bits, part.values.shape[1]) if splits else part.indices]
    gathered = []
    for tensor, width in zip(tensors, (p.kept(cols), p.kept(cols) if splits else p.index_bytes(cols)), strict=True):
        stored, shape = (tensor.t(), (width, rows)) if layer.layout == CONV1D else (tensor, (rows, width))
        shard = DTensor.from_local(
            stored.contiguous(), weight.device_mesh, weight.placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
        )
        gathered.append(local(shard.full_tensor().t() if layer.layout == CONV1D else shard.full_tensor()).contiguous())
    values, indices = gathered
    return ops.Compressed(values, pack_indices(indices, p.index_bits) if splits else indices, p, (rows, cols))
