"""The table of a call's params on the device, made once and found again at the next call with the same tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, reduce
from itertools import chain
from operator import or_
from typing import Any

import torch
from torch import Tensor

from .._adamw_plan import ACROSS, FLAT, GRAD, OUT, Cache, Layout, Lists, P, strides_of
from ._core import DTYPES, core, queue

BLOCKS = 8192
"""Blocks of one launch at most: eight waves of a large GPU, and partial statistics that nine blocks add up in microseconds."""


Pack = tuple[int, ...]
"""Where the packed weight of a param goes: the addresses of its four buffers, 0 for none, and the dtypes of the values."""


@dataclass
class Plan:
    """The device's description of a call: its table and the owners of the blocks; (first tile, tiles, first block, blocks) of its two
    main launches, for flat params and for others."""

    table: Tensor
    owners: Tensor
    packs: Tensor | None
    blocks: int
    parts: tuple[int, ...]


_plans = Cache()
_grads = Cache()


Cut = tuple[int, int, int, bool]


@cache
def cut(module: Any, n: int, m: int, squares: bool) -> Cut:
    """(rows and columns of a piece, pieces of a tile, whether flat params have a launch of their own)."""
    rows, columns, pieces, flat = module.adamw_cut(n, m, squares)
    return rows, columns, pieces, flat


def upload(words: Sequence[int], like: Tensor) -> Tensor:
    """The words as an int64 tensor on the device of ``like``."""
    table = torch.empty(max(len(words), 1), dtype=torch.int64, device=like.device)
    core(like).upload_words(words, table.data_ptr(), *queue(like))
    return table


def plan_of(lists: Lists, steps: list[int], layout: Layout, packs: list[Pack], how: Cut, like: Tensor) -> tuple[Plan, Tensor]:
    """The plan of a call and the table of its gradients' addresses; ``steps`` are addresses, 0 for a count that the host keeps."""
    device = like.device
    addresses = [tuple(map(Tensor.data_ptr, xs)) for xs in lists]
    low = reduce(or_, chain(*addresses), 0)
    # all at multiples of 16: the gradients' addresses matter to nothing but their own table
    kinds = None if low & 15 == 0 else tuple([address & 15 == 0 for address in addresses[GRAD]])
    key = (device, layout.key, tuple(steps), tuple(packs), how, kinds, *addresses[:GRAD])
    plan = _plans.get(key, device)
    if plan is None:
        plan = _plans.put(key, _make(lists, addresses, steps, layout, packs, how, like), device)
    grads = _grads.get((device, addresses[GRAD]), device)
    if grads is None:
        grads = _grads.put((device, addresses[GRAD]), upload(addresses[GRAD], like), device)
    return plan, grads


def _make(
    lists: Lists, addresses: Sequence[tuple[int, ...]], steps: list[int], layout: Layout, packs: list[Pack], how: Cut, like: Tensor
) -> Plan:
    fits = [all(a[i] & 15 == 0 for a in addresses if a) for i in range(len(steps))]
    flat = [i for i, p in enumerate(lists[P]) if how[3] and layout.walks[i] == FLAT and fits[i] and p.numel() % 4 == 0]
    chosen = set(flat)
    order = (flat, [i for i in range(len(steps)) if i not in chosen])
    words: list[int] = []
    parts: list[int] = []
    tiles = blocks = 0
    for indices in order:
        first = tiles
        for i in indices:
            row, count = _row(lists, i, layout.walks[i], fits[i], how)
            words += (*[a[i] if a else 0 for a in addresses[:GRAD]], steps[i], *row[:2], tiles, count, *row[2:])
            tiles += count
        parts += (first, tiles - first, blocks, min(BLOCKS, tiles - first))
        blocks += parts[-1]
    table = upload(words, like)
    owners = torch.empty(blocks, dtype=torch.int32, device=like.device)
    core(like).adamw_owners(table.data_ptr(), len(steps), *parts, owners.data_ptr(), *queue(like))
    packed = upload(list(chain(*[packs[i] for i in chain(*order)])), like) if packs else None
    return Plan(table, owners, packed, blocks, tuple(parts))


def _row(lists: Lists, i: int, walk: int, fits: bool, how: Cut) -> tuple[tuple[int, ...], int]:
    """Rows, columns, dtypes, walk, index and strides of a param, and how many tiles it has."""
    p = lists[P][i]
    cols = p.shape[-1] if p.dim() else 1
    rows = p.numel() // cols if cols else 0
    if walk == FLAT:
        rows, cols = (1, p.numel()) if how[0] == 1 else (rows, cols)
        strides = [cols, 1] * len(lists)
    else:
        strides = strides_of([xs[i] if xs else None for xs in lists])
    wide = fits and all(strides[2 * k] % 4 == 0 and strides[2 * k + 1] == 1 for k, xs in enumerate(lists) if xs)
    codes = DTYPES[p.dtype] | DTYPES[lists[GRAD][i].dtype] << 8 | (DTYPES[lists[OUT][i].dtype] << 16 if lists[OUT] else 0)
    pieces = -(-rows // how[0]) * -(-cols // how[1])
    return (rows, cols, codes, wide | (walk == ACROSS) << 1, i, *strides), -(-pieces // how[2])
