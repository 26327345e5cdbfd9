"""How the params of one call are laid out, grouped into launches and described to the kernel; made once, then found again.

Two steps, each remembered: a ``Layout`` depends on shapes, strides and dtypes alone and says how each param can be walked; a ``Plan``
adds the addresses and lives on the device.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from operator import or_
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from .._tensors import row_stride
from . import _adamw_tile as t
from ._adamw_kernels import owners_kernel
from ._adamw_table import Cache, upload
from ._launch import cdiv, launch, next_power_of_2

ELEMENTS = 1024
"""Elements of a tile: two 16-byte reads of each stream a thread with 4 warps, and few enough registers for 8 blocks on an SM."""

STRIDED = 512
"""Elements of a tile whose every address is an offset of its own, which takes twice the registers."""

P, AVG, SQ, TOP, OUT, GRAD = range(6)
"""The lists of a call, in the order of the kernel's strides."""

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

Lists = list[list[Tensor]]


def _dense(x: Tensor) -> bool:
    """Whether ``x`` fills its memory without gaps, in whatever order of dimensions."""
    reach = 1
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1):
        if stride != reach:
            return False
        reach *= size
    return True


@dataclass
class Layout:
    """Per param its walk (``FLAT``, ``ALONG``, ``ACROSS``), and which tensors (list, param) must be copied because none fits them."""

    key: Hashable
    walks: list[int]
    copies: list[tuple[int, int]]


def _walk(one: list[Tensor], m: int) -> int:
    """How the tensors of one param can be walked together."""
    p = one[P]
    power = m & (m - 1) == 0
    if power and all(x.is_contiguous() for x in one):
        return t.FLAT.value
    if not m and all(x.stride() == p.stride() for x in one) and _dense(p):
        return t.FLAT.value
    step = row_stride(p)
    across = p.dim() > 1 and step is not None and p.stride(-1) > step > 0
    return t.ACROSS.value if across else t.ALONG.value


_layouts: dict[Hashable, Layout] = {}


def layout_of(lists: Lists, n: int, m: int) -> Layout:
    """The layout of a call's tensors; no address is looked at."""
    given = [xs for xs in lists if xs]
    plain = all(map(Tensor.is_contiguous, chain(*given))) and not any(map(Tensor.is_neg, chain(*given)))
    dtypes = tuple([tuple([x.dtype for x in lists[i]]) for i in (P, GRAD, OUT)])
    strides = None if plain else tuple([(x.stride(), x.is_neg()) for x in chain(*given)])
    key = (n, m, bool(lists[TOP]), dtypes, tuple([x.shape for x in lists[P]]), strides)
    found = _layouts.get(key)
    if found is None:
        if len(_layouts) >= 64:
            _layouts.clear()
        walks, copies = [], []
        for i in range(len(lists[P])):
            one = {which: xs[i] for which, xs in enumerate(lists) if xs}
            walks.append(_walk([x for x in one.values() if not x.is_neg()], m))
            flat = walks[-1] == t.FLAT.value
            copies += [(which, i) for which, x in one.items() if x.is_neg() or (not flat and row_stride(x) is None)]
        found = _layouts[key] = Layout(key, walks, copies)
    return found


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
        if walk == t.FLAT.value and lists[P][i].numel() % 8 == 0 and all(a[i] & 15 == 0 for a in addresses if a):
            walk = t.ALIGNED.value
        kind = (walk, *(lists[which][i].dtype if lists[which] else None for which in (P, GRAD, OUT)))
        members.setdefault(kind, []).append(i)
    strided = any(kind[0] in (t.ALONG.value, t.ACROSS.value) for kind in members)
    width = t.STRIDED_WORDS if strided else t.FLAT_WORDS
    rows: list[list[int]] = [[] for _ in steps]
    groups, programs = [], 0
    for (walk, p, grad, out), indices in members.items():
        first, (tile, padded) = programs, _tile(walk, m)
        for i in indices:
            tensors = [xs[i] if xs else None for xs in lists]
            size, tail = (lists[P][i].numel(), []) if walk < t.ALONG.value else _strides(tensors, walk, m or 1)
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
    return (max(ELEMENTS, padded), padded) if walk < t.ALONG.value else (max(1, STRIDED // padded), padded)


def _strides(tensors: Sequence[Tensor | None], walk: int, m: int) -> tuple[int, list[int]]:
    """Groups, and [inner count, (row stride, column stride) of each tensor] of a strided param."""
    p = tensors[P]
    assert p is not None
    cols = p.shape[-1] if p.dim() else 1
    rows = p.numel() // cols if cols else 0
    pairs = [(row_stride(x) or 0, x.stride(-1) if x.dim() else 1) if x is not None else (0, 0) for x in tensors]
    return p.numel() // m, [rows if walk == t.ACROSS.value else cols // m, *chain(*pairs)]


def written(lists: Lists, layout: Layout) -> Iterator[tuple[Tensor, Tensor]]:
    """Replaces the tensors that fit no walk by copies in ``lists``; yields (tensor, copy) of those that the step writes."""
    for which, i in layout.copies:
        original = lists[which][i]
        lists[which] = [*lists[which][:i], original.resolve_neg().contiguous(), *lists[which][i + 1 :]]
        if which != GRAD:
            yield original, lists[which][i]
