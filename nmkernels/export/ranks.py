"""Writing a model whose tensors ranks share: gathered one by one, kept by the first rank, and written by it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..layouts import CONV1D
from ..nn import CompressedLinear, NMWeight
from ..pattern import CheckpointError, RecipeError
from ..reference.compress import pack_indices, unpack_indices
from ..shards import is_sharded, local, whole
from .tensors import without_aliases, write


class Ranks:
    """The ranks over which the tensors of ``model`` are sharded; where none is, this process alone.

    Attributes:
        first: this rank keeps what is gathered.
    """

    def __init__(self, model: nn.Module) -> None:
        meshes = [value.device_mesh for value in model.state_dict().values() if isinstance(value, Tensor) and is_sharded(value)]  # type: ignore[attr-defined]
        # of FSDP2 beside tensor parallelism some tensors lie on a part of the mesh
        self.mesh: Any = max(meshes, key=lambda mesh: mesh.size(), default=None)
        self.first = self.mesh is None or not any(self.mesh.get_coordinate())

    def agree(self, problem: str) -> None:
        """Raise ``RecipeError`` on every rank if there is a ``problem`` on one of them: those that went on would wait for it for ever."""
        for told in self._told(problem):
            if told:
                raise RecipeError(told)

    def _told(self, mine: str) -> list[str]:
        told = [mine]
        for group in () if self.mesh is None else self.mesh.get_all_groups():
            rows: list[Any] = [None] * group.size()
            torch.distributed.all_gather_object(rows, told, group=group)
            told = [text for row in rows for text in row]
        return told

    def packed(self, layer: NMWeight | CompressedLinear) -> ops.Compressed:
        """The whole compressed weight ``(out, in)``; on the other ranks than the first on the meta device."""
        if isinstance(layer, NMWeight):
            weight = _gathered(layer)
        elif self.mesh is None:
            return layer.weight
        else:
            state, p = layer.state_dict(), layer.pattern  # where a part of the weight says of what it is one
            values, indices = whole(state["values"]), whole(state["indices"])
            weight = ops.Compressed(values, indices, p, (values.shape[0], values.shape[1] // p.n * p.m))
        on = "cpu" if self.first else "meta"
        return ops.Compressed(weight.values.to(on), weight.indices.to(on), weight.pattern, weight.shape)

    def dense(self, layer: CompressedLinear) -> Tensor:
        """The whole weight ``(out, in)`` in dense layout; on the other ranks than the first on the meta device."""
        if self.mesh is None:
            return layer.dense()
        packed = self.packed(layer)
        if not self.first:
            return torch.empty(packed.shape, dtype=packed.dtype, device="meta")
        dense, order = packed.dense(), layer.order
        return dense if order is None else dense.index_select(1, order.cpu().long().argsort())

    def write(
        self,
        path: str | os.PathLike[str],
        tensors: dict[str, Tensor],
        metadata: dict[str, str],
        told: Callable[[dict[str, str]], dict[str, str]],
    ) -> None:
        """Gather ``tensors`` and write them; of aliases, which are not gathered, the metadata has what ``told`` makes of them.

        Raises:
            CheckpointError: on every rank, if the first could not write.
        """
        # by memory that an empty shard does not have: what is tied is for the first rank to say
        own, aliases = without_aliases(tensors)
        ready: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            gathered = whole(tensor)
            if name in own and self.first:
                ready[name] = gathered.cpu() if is_sharded(tensor) else tensor
        problem = ""
        if self.first:
            try:
                write(path, ready, {**metadata, **(told(aliases) if aliases else {})})
            except CheckpointError as error:
                if self.mesh is None:
                    raise
                problem = str(error)
        for text in self._told(problem):
            if text:
                raise CheckpointError(text)


def _gathered(layer: NMWeight) -> ops.Compressed:
    """The compressed weight of a finished layer; of a sharded one every rank compresses its part, and only that is sent."""
    with torch.no_grad():
        mine = ops.compress(layer.grouped.detach(), layer.pattern)
    weight: Any = layer.parameter
    if not is_sharded(weight):
        return mine
    from torch.distributed.tensor import DTensor

    (rows, cols), p = layer.shape, layer.pattern
    # where shards split the columns, their bytes of indices may not meet
    splits = any(placement.is_shard(layer.reduced) for placement in weight.placements)
    parts = [mine.values, unpack_indices(mine.indices, p.index_bits, mine.values.shape[1]) if splits else mine.indices]
    found = []
    for part, width in zip(parts, (p.kept(cols), p.kept(cols) if splits else p.index_bytes(cols)), strict=True):
        stored, shape = (part.t(), (width, rows)) if layer.layout == CONV1D else (part, (rows, width))
        sent = DTensor.from_local(
            stored.contiguous(), weight.device_mesh, weight.placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
        )
        found.append(local(sent.full_tensor().t() if layer.layout == CONV1D else sent.full_tensor()).contiguous())
    values, indices = found
    return ops.Compressed(values, pack_indices(indices, p.index_bits) if splits else indices, p, (rows, cols))
