"""What this rank holds of a tensor that ranks share (a DTensor), and sums over all that they hold.

A rank holds one shard of a dimension that is sharded, and the whole of one that is replicated. So sums run over the mesh dimensions that
shard, and over no others: replicas hold the same numbers, which must not be counted twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .layouts import LINEAR, ordered

Groups = tuple[Any, ...]
"""The process groups over which a tensor is sharded, outermost first; empty for one that this rank holds whole."""


def is_sharded(tensor: Tensor | None) -> bool:
    """Whether ``tensor`` is a DTensor, told by name so that a process of its own never imports ``torch.distributed.tensor``."""
    return type(tensor).__name__ == "DTensor"


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``: the same memory, without autograd."""
    found: Tensor = tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return found


def whole(tensor: Tensor) -> Tensor:
    """All of ``tensor``, gathered from every rank, which therefore all have to call it; a plain tensor as it is."""
    found: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return found


def like(tensor: Tensor, part: Tensor) -> Tensor:
    """``part``, of the shape of this rank's part of ``tensor``, as a tensor that is sharded as ``tensor`` is."""
    if not is_sharded(tensor):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements, shape = tensor.device_mesh, tensor.placements, tensor.shape  # type: ignore[attr-defined]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride)


def spread(tensor: Tensor, full: Tensor) -> Tensor:
    """``full``, which every rank has, sharded as ``tensor`` is."""
    if not is_sharded(tensor):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)  # type: ignore[attr-defined]


def groups_of(tensor: Tensor) -> Groups:
    """The groups over which ``tensor`` is sharded."""
    if not is_sharded(tensor):
        return ()
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    return tuple(mesh.get_group(i) for i, placement in enumerate(placements) if not placement.is_replicate())


def gathered(row: Tensor, groups: Groups) -> Tensor:
    """``row`` ``(k,)`` of every rank of ``groups``, ``(ranks, k)``, in the same order everywhere: one collective for each group."""
    rows = row.detach().reshape(1, -1)
    for group in groups:
        gather = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)
        out = rows.new_empty(group.size() * rows.shape[0], rows.shape[1])
        gather(out, rows.contiguous(), group=group)
        rows = out
    return rows


def reduced(parts: dict[Groups, Tensor], merge: Callable[[Tensor, Tensor], Tensor] = torch.add) -> Tensor:
    """``parts``, a row for each set of groups, merged over their ranks and with each other; bit-equal on every rank."""
    rows = [row for groups, part in parts.items() for row in gathered(part, groups)]
    return functools.reduce(merge, rows)


def add(parts: dict[Groups, Tensor], tensor: Tensor, value: Tensor) -> None:
    """Add ``value``, which is of this rank's part of ``tensor``, to those of tensors that the same ranks share; for ``reduced``."""
    groups = groups_of(tensor)
    parts[groups] = parts[groups] + value if groups in parts else value


def total(fn: Callable[[Tensor], Tensor], tensors: Iterable[Tensor]) -> Tensor:
    """Σ of ``fn``, a 0-d sum over the elements that it is given, over all of ``tensors``, whichever rank holds them."""
    parts: dict[Groups, Tensor] = {}
    for tensor in tensors:
        add(parts, tensor, fn(local(tensor)).reshape(1))
    return reduced(parts).reshape(())


def anywhere(tensor: Tensor, flag: bool) -> bool:
    """Whether ``flag`` is true on any rank over which ``tensor`` is sharded: an error on one alone would leave the others waiting."""
    return bool(reduced({groups_of(tensor): torch.tensor([float(flag)], dtype=torch.float32, device=local(tensor).device)}).item())


def align_gradient(parameter: Tensor, layout: str = LINEAR) -> Tensor | None:
    """The gradient of ``parameter``, laid out as that is: under sequence parallel a replicated weight's is a part of a sum on each rank,
    and somebody may have set one whose memory is not in the order of ``layout``."""
    grad = parameter.grad
    if grad is None:
        return None
    if is_sharded(grad):
        if grad.placements != parameter.placements:  # type: ignore[attr-defined]
            parameter.grad = grad = grad.redistribute(parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
    elif layout != LINEAR and (right := ordered(grad, layout)) is not grad:
        parameter.grad = grad = right
    return grad
