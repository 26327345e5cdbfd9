"""MaskedAdamW over any number of params: the scalars of each, one pass over all of them, the sum of the statistics.

Three launches, four where some params are flat in memory and others are not. The host reads no number of the device; it hands over a
table of addresses, which is made once and found again at the next call with the same tensors. All of it may be captured in a CUDA graph
if the step counts are on the device (``capturable=True``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from itertools import chain
from operator import or_
from typing import Any

import torch
from torch import Tensor

from ...dispatch import Verdict
from ...reference.layouts import LAYOUTS
from .. import streams
from ..adamw import STATS, count, of_one_kind, opened
from ..shared import address, dense, row_stride, write_rows
from ..streams import Made
from .compress import pack
from .core import DTYPES, core, queue, register, runnable

BLOCKS = 8192
"""Blocks of one launch at most: eight waves of a large GPU, and partial statistics that nine blocks add up in microseconds."""

SCALARS = 16
"""Words of 32 bits that the kernels keep of the numbers of a param."""

HYPER = 8
"""Elements of ``hyper`` that are used."""

P, _, _, TOP, OUT, GRAD = range(6)
"""The lists of a call, in the order of the kernels' tables."""

FLAT, ALONG, ACROSS = range(3)
"""How a param lies: flat; strided with neighbours along a group, or across groups."""

KEPT = 128
"""Tables that a cache holds; a training step uses two per parameter group and per kind of parameter."""

Lists = list[list[Tensor]]
Cut = tuple[int, int, int, bool]
Pack = tuple[int, ...]
"""Where the packed weight of a param goes: the addresses of its four buffers, 0 for none, and the dtypes of the values."""


@dataclass
class Layout:
    """Per param its walk, and which tensors (list, param) must be copied because no walk fits them."""

    key: Hashable
    walks: list[int]
    copies: list[tuple[int, int]]


def _walk(one: list[Tensor], m: int, flat: bool) -> int:
    """How the tensors of one param can be walked together."""
    p = one[P]
    if flat and all(x.is_contiguous() for x in one):
        return FLAT
    if not m and all(x.stride() == p.stride() for x in one) and dense(p):
        return FLAT
    step = row_stride(p)
    return ACROSS if p.dim() > 1 and step is not None and p.stride(-1) > step > 0 else ALONG


_layouts: dict[Hashable, Layout] = {}


def layout_of(lists: Lists, n: int, m: int, flat: bool) -> Layout:
    """The layout of a call's tensors; no address is looked at. ``flat``: whether the kernel walks contiguous ones of this M as one row."""
    given = [xs for xs in lists if xs]
    plain = all(map(Tensor.is_contiguous, chain(*given))) and not any(map(Tensor.is_neg, chain(*given)))
    dtypes = tuple([tuple([x.dtype for x in lists[i]]) for i in (P, GRAD, OUT)])
    strides = None if plain else tuple([(x.stride(), x.is_neg()) for x in chain(*given)])
    key = (n, m, flat, bool(lists[TOP]), dtypes, tuple([x.shape for x in lists[P]]), strides)
    found = _layouts.get(key)
    if found is None:
        if len(_layouts) >= 64:
            _layouts.clear()
        walks, copies = [], []
        for i in range(len(lists[P])):
            one = {which: xs[i] for which, xs in enumerate(lists) if xs}
            walks.append(_walk([x for x in one.values() if not x.is_neg()], m, flat))
            copies += [(which, i) for which, x in one.items() if x.is_neg() or (walks[-1] != FLAT and row_stride(x) is None)]
        found = _layouts[key] = Layout(key, walks, copies)
    return found


def written(lists: Lists, layout: Layout) -> Iterator[tuple[Tensor, Tensor]]:
    """Replaces the tensors that fit no walk by copies in ``lists``; yields (tensor, copy) of those that the step writes."""
    for which, i in layout.copies:
        original = lists[which][i]
        lists[which] = [*lists[which][:i], original.resolve_neg().contiguous(), *lists[which][i + 1 :]]
        if which != GRAD:
            yield original, lists[which][i]


class Cache:
    """Things on a device by the words that they were made of; the ones used longest ago are dropped, but for what a graph reads."""

    def __init__(self) -> None:
        self.entries: OrderedDict[Hashable, Made[Any]] = OrderedDict()
        self.pinned: dict[Hashable, Made[Any]] = {}

    def get(self, key: Hashable) -> Any:
        """What was made for ``key``, for the current stream, or None."""
        found = self.entries.get(key)
        if found is not None:
            self.entries.move_to_end(key)
        else:
            found = self.pinned.get(key)
        return None if found is None else found.get()

    def put(self, key: Hashable, value: Any, tensors: Sequence[Tensor], device: torch.device) -> None:
        """Keep ``value``, whose memory is ``tensors``, for the next call, unless this one is captured."""
        if not streams.capturing(device):
            self.entries[key] = Made(value, tensors, device)
            if len(self.entries) > KEPT:
                oldest, dropped = self.entries.popitem(last=False)
                if dropped.captured:
                    self.pinned[oldest] = dropped


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
    plan = _plans.get(key)
    if plan is None:
        plan = _make(lists, addresses, steps, layout, packs, how, like)
        _plans.put(key, plan, [x for x in (plan.table, plan.owners, plan.packs) if x is not None], device)
    grads = _grads.get((device, addresses[GRAD]))
    if grads is None:
        grads = upload(addresses[GRAD], like)
        _grads.put((device, addresses[GRAD]), grads, [grads], device)
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
        strides = [s for xs in lists for s in ((row_stride(xs[i]) or 0, xs[i].stride(-1) if xs[i].dim() else 1) if xs else (0, 0))]
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
    device, scale, found, stats, numbers, held, skip = opened(params, steps, hyper, grad_scale, found_inf, out)
    if skip:
        return stats
    like = params[0] if params else hyper
    kernels = core(like)
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
    given = hyper.tolist()[:HYPER] if numbers is None else [0.0] * HYPER
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
