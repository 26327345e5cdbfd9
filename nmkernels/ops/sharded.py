"""Sharding rules of the ops for DTensors; imported at the first call with a DTensor.

Groups lie along the last dimension, tiles along the last two. Shards of earlier dimensions stay; torch redistributes the others in the
cheapest way. Training does not use this: layers and optimizers work on local shards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from .. import reference
from ..pattern import NMError
from ..shards import groups_of, local, reduced

GROUPED = dict.fromkeys(("nm_mask", "nm_prune", "nm_soft_threshold", "nm_compress", "nm_decompress"), 1)
GROUPED |= {"nm_soft_threshold_scale": -1, "nm_transposable_mask": 2}
"""How many trailing dimensions of each op must not be sharded; -1 for all."""


def _register(name: str, whole: int) -> None:
    op = getattr(torch.ops.nmkernels, name).default
    results = len(op._schema.returns)

    def rule(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        free = args[0].ndim - whole if whole > 0 else 0
        ways = (Replicate(), *(Shard(dim) for dim in range(free)))
        return [([way] * results, [way if hasattr(arg, "ndim") else None for arg in args]) for way in ways]

    register_sharding(op)(rule)


for _name, _whole in GROUPED.items():
    _register(_name, _whole)


def check(name: str, out: Any) -> None:
    """Raise ``NMError`` if the op ``name`` does not support DTensors."""
    if name not in GROUPED:
        raise NMError(f"{name}: DTensors are not supported. Pass x.to_local(), this rank's part, or x.full_tensor(), all of it.")
    if out is not None:
        raise NMError(f"{name}: out= is not supported with DTensors. Omit it, and copy the result.")


def is_nm(w: Any, n: int, m: int) -> bool:
    """Whether every group of the DTensor ``w`` is N:M; all ranks must call it, and get the same result."""
    placements = [p if p.is_replicate() or getattr(p, "dim", w.ndim) < w.ndim - 1 else Replicate() for p in w.placements]
    w = w.redistribute(placements=placements)
    part: Tensor = local(w)
    wrong = torch.tensor([float(not reference.is_nm(part, n, m))], dtype=torch.float32, device=part.device)
    return float(reduced({groups_of(w): wrong})) == 0
