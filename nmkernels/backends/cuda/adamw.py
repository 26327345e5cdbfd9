"""MaskedAdamW over any number of params: the scalars of each, one pass over all of them, the sum of the statistics.

Three launches, four where some params are flat in memory and others are not. The host reads no number of the device; it hands over a
table of addresses, which is made once and found again at the next call with the same tensors. All of it may be captured in a CUDA graph
if the step counts are on the device (``capturable=True``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, reduce
from itertools import chain
from operator import or_
from typing import Any

import torch
from torch import Tensor

from ...dispatch import Verdict
from ...reference.layouts import LAYOUTS
from ..adamw_plan import (
    ACROSS,
    FLAT,
    GRAD,
    OUT,
    Cache,
    Layout,
    Lists,
    P,
    count,
    layout_of,
    of_one_kind,
    on_host,
    skipped,
    strides_of,
    written,
)
from ..pack import write_rows
from .core import DTYPES, address, core, queue, register, runnable
from .pack import pack

BLOCKS = 8192
"""Blocks of one launch at most: eight waves of a large GPU, and partial statistics that nine blocks add up in microseconds."""


STATS = 9
SCALARS = 16
"""Words of 32 bits that the kernels keep of the numbers of a param."""

HYPER = 8
"""Elements of ``hyper`` that are used."""

Cut = tuple[int, int, int, bool]
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


def _fits(args: tuple[Any, ...], device: str) -> Verdict:
    """What it can run; step counts and ``hyper`` may be on the CPU."""
    params, grads, outs, hyper = args[0], args[1], args[6], args[7]
    alike = of_one_kind(params, grads, outs)
    if not alike[0]:
        return alike
    transposable, packs = (*args[16:18], False, None)[:2]
    if transposable and tuple(args[8:10]) != (2, 4):
        return False, f"it masks by tiles at 2:4 only, and this call is at {args[8]}:{args[9]}"
    if any(x.dtype == torch.float64 for x in packs or ()):
        return False, "it computes in float32, and float64 values are asked for"
    return runnable((*params[:1], *(x for x in grads if x.layout != torch.strided)) if params else [hyper], device)


def _packs(packs: Sequence[Tensor] | None, copies: list[tuple[Tensor, Tensor]]) -> list[Pack]:
    """Where the packed weights go; a buffer that the kernel cannot write is replaced by a copy, added to ``copies``."""
    if not packs:
        return []
    addresses = [x.data_ptr() if x.numel() else 0 for x in packs]
    for k, x in enumerate(packs):
        if addresses[k] & 15 or not x.is_contiguous():
            copies.append((x, torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)))
            addresses[k] = copies[-1][1].data_ptr()
    codes = [DTYPES[x.dtype] for x in packs[::2]]
    return [(*addresses[4 * i : 4 * i + 4], codes[2 * i] | codes[2 * i + 1] << 8) for i in range(len(packs) // 4)]


@register("nm_masked_adamw_", fits=_fits)
def masked_adamw_(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor], steps: Sequence[Tensor], outs: Sequence[Tensor], hyper: Tensor, n: int, m: int,
    frozen: bool = False, eps_inside: bool = False, maximize: bool = False, geometric: bool = False,
    grad_scale: Tensor | None = None, found_inf: Tensor | None = None,
    transposable: bool = False, packs: Sequence[Tensor] | None = None, layout: str = "canonical", out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``nm_masked_adamw_``; packed weights of other patterns than 2:4 take launches of their own."""
    like = params[0] if params else hyper
    device, kernels = like.device, core(like)
    scale = None if grad_scale is None else grad_scale.to(device, non_blocking=True)
    found = None if found_inf is None else found_inf.to(device, non_blocking=True)
    stats = torch.empty(STATS, dtype=torch.float64, device=device) if out is None else out
    held = [i for i, step in enumerate(steps) if on_host(step, device)]
    if held and skipped(found_inf, device):
        return stats.zero_()
    lists: Lists = [list(xs) for xs in (params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, outs, grads)]
    apart = packs if (n, m) != (2, 4) else None
    packs = None if apart else packs
    squares = transposable or bool(packs)
    how = cut(kernels, n, m, squares)
    strides = layout_of(lists, n, m, how[3])
    copies = list(written(lists, strides))
    packed = _packs(packs, copies)
    addresses = [step.data_ptr() for step in steps]
    for i in held:
        addresses[i] = 0
    plan, gradients = plan_of(lists, addresses, strides, packed, how, like)
    one, several = count(steps, held)
    counts = None if several is None else upload(several, like)
    scalars = torch.empty(len(steps), SCALARS, dtype=torch.int32, device=device)
    partials = torch.empty(STATS, plan.blocks, dtype=torch.float64, device=device)
    numbers, given = (None, hyper.tolist()[:HYPER]) if on_host(hyper, device) else (hyper.contiguous(), [0.0] * HYPER)
    kernels.masked_adamw(
        plan.table.data_ptr(), gradients.data_ptr(), plan.owners.data_ptr(), scalars.data_ptr(), partials.data_ptr(), stats.data_ptr(),
        len(steps), *plan.parts, address(numbers), given, address(counts), one, address(scale), address(found),
        n, m, frozen, eps_inside, maximize, geometric, bool(max_exp_avg_sqs),
        squares, transposable, address(plan.packs), LAYOUTS.index(layout), *queue(like),
    )  # fmt: skip
    for target, copy in copies:
        target.copy_(copy)
    write_rows(pack, params, n, m, apart, layout, found)
    return stats
