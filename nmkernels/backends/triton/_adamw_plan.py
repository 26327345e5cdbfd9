"""How the params of one call are laid out, grouped into launches and described to the kernel; made once, then found again.

Two steps, each remembered: a ``Layout`` says how each param can be walked; a ``Plan`` adds the addresses and lives on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from operator import or_
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..adamw_plan import ACROSS, ALIGNED, ALONG, FLAT, GRAD, OUT, Cache, Layout, Lists, P, strides_of
from . import _adamw_tile as t
from ._adamw_kernels import owners_kernel
from ._adamw_table import upload
from ._launch import cdiv, launch, next_power_of_2

ELEMENTS = 1024
"""Elements of a tile: two 16-byte reads of each stream a thread with 4 warps, and few enough registers for 8 blocks on an SM."""

STRIDED = 512
"""Elements of a tile whose every address is an offset of its own, which takes twice the registers."""

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass
class Group:
    """The params of one main launch: its tiles are the programs from ``first`` on."""

    first: int
    programs: int
    constexprs: dict[str, Any]


@dataclass
class Plan:
    """The device's description of a call: table, owners of the programs, launches."""

    table: Tensor
    owners: Tensor
    words: int
    programs: int
    groups: list[Group]


_plans = Cache()
_grads = Cache()


def plan_of(lists: Lists, steps: list[int], layout: Layout, n: int, m: int, device: torch.device) -> tuple[Plan, Tensor]:
    """The plan of a call and the table of its gradients' addresses; ``steps`` are addresses, 0 for a count that the host keeps."""
    addresses = [tuple(map(Tensor.data_ptr, xs)) for xs in lists]
    low = reduce(or_, chain(*addresses), 0)
    # all at multiples of 16: the gradients' addresses matter to nothing but their own table
    kinds = None if low & 15 == 0 else tuple([address & 15 == 0 for address in addresses[GRAD]])
    key = (device, layout.key, tuple(steps), kinds, *addresses[:GRAD])
    plan = _plans.get(key, device)
    if plan is None:
        plan = _plans.put(key, _make(lists, addresses, steps, layout, n, m, device), device)
    grads = _grads.get((device, addresses[GRAD]), device)
    if grads is None:
        grads = _grads.put((device, addresses[GRAD]), upload(addresses[GRAD], device), device)
    return plan, grads


def _make(
    lists: Lists, addresses: Sequence[tuple[int, ...]], steps: list[int], layout: Layout, n: int, m: int, device: torch.device
) -> Plan:
    members: dict[Any, list[int]] = {}
    for i in range(len(steps)):
        walk = layout.walks[i]
        if walk == FLAT and lists[P][i].numel() % 8 == 0 and all(a[i] & 15 == 0 for a in addresses if a):
            walk = ALIGNED
        kind = (walk, *(lists[which][i].dtype if lists[which] else None for which in (P, GRAD, OUT)))
        members.setdefault(kind, []).append(i)
    strided = any(kind[0] in (ALONG, ACROSS) for kind in members)
    width = t.STRIDED_WORDS if strided else t.FLAT_WORDS
    rows: list[list[int]] = [[] for _ in steps]
    groups, programs = [], 0
    for (walk, p, grad, out), indices in members.items():
        first, (tile, padded) = programs, _tile(walk, m)
        for i in indices:
            tensors = [xs[i] if xs else None for xs in lists]
            size, tail = (lists[P][i].numel(), []) if walk < ALONG else _strides(tensors, walk, m or 1)
            tiles = cdiv(size, tile)
            start = [a[i] if a else 0 for a in addresses[:GRAD]]
            rows[i] = [*start, steps[i], size, programs, tiles, *tail]
            rows[i] += [0] * (width - len(rows[i]))
            programs += tiles
        kinds = {"P": DTYPES[p], "G": DTYPES[grad], "OUT": DTYPES[out] if out else None}
        groups.append(Group(first, programs - first, {**kinds, "N": n, "M": m or 1, "TILE": tile, "PADDED": padded, "LAYOUT": walk}))
    table = upload(list(chain(*rows)), device)
    owners = torch.empty(programs, dtype=torch.int32, device=device)
    if programs:
        launch(owners_kernel, len(steps), (table, owners), WORDS=width, BLOCK=ELEMENTS)
    return Plan(table, owners, width, programs, groups)


def _tile(walk: int, m: int) -> tuple[int, int]:
    """(elements of a flat tile or groups of a strided one, M padded to a power of two)."""
    padded = next_power_of_2(m)
    return (max(ELEMENTS, padded), padded) if walk < ALONG else (max(1, STRIDED // padded), padded)


def _strides(tensors: Sequence[Tensor | None], walk: int, m: int) -> tuple[int, list[int]]:
    """Groups, and [inner count, (row stride, column stride) of each tensor] of a strided param."""
    p = tensors[P]
    assert p is not None
    cols = p.shape[-1] if p.dim() else 1
    rows = p.numel() // cols if cols else 0
    return p.numel() // m, [rows if walk == ACROSS else cols // m, *strides_of(tensors)]
