"""This rank's part of a sharded tensor (DTensor), and sums over the parts of all ranks.

A rank holds one shard along a sharded mesh dimension, and everything along a replicated one. So sums run over the sharded mesh dimensions
only: replicas hold the same numbers, which must not be counted twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .layouts import LINEAR, ordered

Groups = tuple[Any, ...]
"""The process groups that shard a tensor, outermost first; empty if this rank holds all of it."""


def is_sharded(tensor: Tensor | None) -> bool:
    """Whether ``tensor`` is a DTensor; tested by name, so that single-process runs never import ``torch.distributed.tensor``."""
    return type(tensor).__name__ == "DTensor"


def own_rank() -> int:
    """This process among those of ``torch.distributed``; 0 where there is no other."""
    return torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0


def local(tensor: Tensor) -> Tensor:
    """This rank's part of ``tensor``, sharing its memory, without autograd."""
    part: Tensor = tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def place(tensor: Tensor) -> tuple[object, ...]:
    """A key that is equal for two tensors that are the same memory, unless they are empty or on the meta device."""
    return tensor.device, local(tensor).data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def whole(tensor: Tensor) -> Tensor:
    """All of ``tensor``, gathered from every rank (all must call it); a plain tensor is returned as it is."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return full


def like(tensor: Tensor, part: Tensor) -> Tensor:
    """``part``, with the shape of this rank's part of ``tensor``, as a tensor sharded like ``tensor``."""
    if not is_sharded(tensor):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements, shape = tensor.device_mesh, tensor.placements, tensor.shape  # type: ignore[attr-defined]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride)


def spread(tensor: Tensor, full: Tensor) -> Tensor:
    """``full``, which every rank has, sharded like ``tensor``."""
    if not is_sharded(tensor):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)  # type: ignore[attr-defined]


def groups_of(tensor: Tensor) -> Groups:
    """The process groups that shard ``tensor``."""
    if not is_sharded(tensor):
        return ()
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    return tuple(mesh.get_group(i) for i, placement in enumerate(placements) if not placement.is_replicate())


def gathered(row: Tensor, groups: Groups) -> Tensor:
    """Gather ``row`` ``(k,)`` of every rank of ``groups`` into ``(ranks, k)``, in the same order everywhere; one collective per group."""
    rows = row.detach().reshape(1, -1)
    for group in groups:
        gather = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)
        out = rows.new_empty(group.size() * rows.shape[0], rows.shape[1])
        gather(out, rows.contiguous(), group=group)
        rows = out
    return rows


def reduced(parts: dict[Groups, Tensor], merge: Callable[[Tensor, Tensor], Tensor] = torch.add) -> Tensor:
    """Reduce ``parts``, one row per set of groups, over their ranks and with each other; bit-equal on every rank."""
    rows = [row for groups, part in parts.items() for row in gathered(part, groups)]
    return functools.reduce(merge, rows)


def summed(values: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Σ of the second ones of pairs, 0-d or ``(k,)``, each computed from this rank's part of the first one, over all ranks: ``(k,)``."""
    parts: dict[Groups, Tensor] = {}
    for tensor, value in values:
        groups = groups_of(tensor)
        parts[groups] = parts[groups] + value if groups in parts else value
    return reduced(parts)


def total(fn: Callable[[Tensor], Tensor], tensors: Iterable[Tensor]) -> Tensor:
    """Σ of ``fn``, a 0-d sum over a tensor's elements, over all of ``tensors`` on all ranks."""
    return summed((tensor, fn(local(tensor))) for tensor in tensors).reshape(())


def anywhere(tensor: Tensor, flag: bool) -> bool:
    """Whether ``flag`` is true on any rank that shares ``tensor``, so that all raise: an error on one alone would leave the others
    waiting."""
    return bool(reduced({groups_of(tensor): torch.tensor([float(flag)], dtype=torch.float32, device=local(tensor).device)}).item())


def align_gradient(parameter: Tensor, layout: str = LINEAR) -> Tensor | None:
    """The gradient of ``parameter``, with its placements and its order in memory.

    Under sequence parallelism each rank has a partial sum of a replicated weight's gradient; and a gradient set by hand may not be in the
    order of ``layout``.
    """
    grad = parameter.grad
    if grad is None:
        return None
    if is_sharded(grad):
        if grad.placements != parameter.placements:  # type: ignore[attr-defined]
            parameter.grad = grad = grad.redistribute(parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
    elif layout != LINEAR and (right := ordered(grad, layout)) is not grad:
        parameter.grad = grad = right
    return grad
