"""MaskedAdamW over any number of params: a kernel for their scalars, one pass over all of them, and the sum of the statistics.

These are three launches, or four if only some of the params are flat in memory. The host reads nothing back from the device. It passes a
table of addresses, which is cached for the next call with the same tensors. All of it can be captured in a CUDA graph if the step counts
are on the device (``capturable=True``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from functools import cache, reduce
from itertools import chain
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch import Verdict
from ...reference.adamw import AdamWArgs
from .. import streams
from ..adamw import STATS, advance, placed, supports_tensors, to_device, with_plain_masks
from ..shared import address, dense, row_stride
from ..streams import Made
from .core import DTYPES, core, queue, register, runnable

BLOCKS = 8192
"""The most blocks of a launch: eight waves of a large GPU, and nine blocks sum their partial statistics in microseconds."""

SCALARS = 16
"""32-bit words in which the kernels keep the numbers of a param."""

P, FIRST, _, TOP, GRAD = range(5)
"""The lists of a call, in the order of the kernels' tables."""

FLAT, ALONG, ACROSS = range(3)
"""How a param lies in memory: flat, or strided with neighbours along a group or across groups."""

MOST_TABLES = 128
"""Tables that a cache holds; a training step uses two per parameter group and per kind of parameter."""

TILES = 64, 64, False
"""The cut where forms are written: columns of a piece of a row, pieces of a tile, whether flat params have a launch of their own."""

Lists = list[list[Tensor]]
Cut = tuple[int, int, bool]


class Forms(NamedTuple):
    """The forms that a step writes: the address of their table, codes of rule, layout and the gradients' dtype, and whether it has columns
    and dense forms."""

    table: int
    select: int
    layout: int
    gradient: int
    columns: bool
    dense: bool


class Layout(NamedTuple):
    """The walk of each param, and which tensors (list, param) must be copied because no walk fits them."""

    key: Hashable
    walks: list[int]
    copies: list[tuple[int, int]]


def _walk(one: list[Tensor], m: int, flat: bool, held: bool, ordered: bool) -> int:
    """How the tensors of one param can be walked together.

    ``held``: with the bits of a mask, whose rows are whole bytes; ``ordered``: row by row, as each element has a random word.
    """
    p = one[P]
    if flat and all(x.is_contiguous() for x in one) and not (held and p.shape[-1] % 8 and p.numel() > p.shape[-1]):
        return FLAT
    if not (m or held or ordered) and all(x.stride() == p.stride() for x in one) and dense(p):
        return FLAT
    step = row_stride(p)
    return ACROSS if p.dim() > 1 and step is not None and p.stride(-1) > step > 0 else ALONG


_layouts: dict[Hashable, Layout] = {}


def layout_of(lists: Lists, n: int, m: int, flat: bool, held: bool, ordered: bool) -> Layout:
    """The layout of a call's tensors, whatever their addresses. ``flat``: the kernel walks contiguous ones of this M as one row."""
    plain = all(map(Tensor.is_contiguous, chain(*lists))) and not any(map(Tensor.is_neg, chain(*lists)))
    dtypes = tuple([tuple([x.dtype for x in lists[i]]) for i in (P, FIRST, GRAD)])
    strides = None if plain else tuple([(x.stride(), x.is_neg()) for x in chain(*lists)])
    key = (n, m, flat, held, ordered, bool(lists[TOP]), dtypes, tuple([x.shape for x in lists[P]]), strides)
    layout = _layouts.get(key)
    if layout is None:
        if len(_layouts) >= 64:
            _layouts.clear()
        walks, copies = [], []
        for i in range(len(lists[P])):
            one = {which: xs[i] for which, xs in enumerate(lists) if xs}
            walks.append(_walk([x for x in one.values() if not x.is_neg()], m, flat, held, ordered))
            copies += [(which, i) for which, x in one.items() if x.is_neg() or (walks[-1] != FLAT and row_stride(x) is None)]
        layout = _layouts[key] = Layout(key, walks, copies)
    return layout


class Cache:
    """A least-recently-used cache of things in device memory, which keeps whatever a CUDA graph reads."""

    def __init__(self) -> None:
        self.entries: OrderedDict[Hashable, Made[Any]] = OrderedDict()
        self.pinned: dict[Hashable, Made[Any]] = {}

    def get(self, key: Hashable) -> Any:
        """The value of ``key``, ready for the current stream, or None."""
        entry = self.entries.get(key)
        if entry is not None:
            self.entries.move_to_end(key)
        else:
            entry = self.pinned.get(key)
        return None if entry is None else entry.get()

    def put(self, key: Hashable, value: Any, tensors: Sequence[Tensor], device: torch.device) -> None:
        """Keep ``value``, whose memory is ``tensors``, for later calls, unless this call is being captured."""
        if not streams.capturing(device):
            self.entries[key] = Made(value, tensors, device)
            if len(self.entries) > MOST_TABLES:
                oldest, dropped = self.entries.popitem(last=False)
                if dropped.captured:
                    self.pinned[oldest] = dropped


class Tables(NamedTuple):
    """A call as the kernels read it.

    Args:
        table: a row of words per param.
        owners: the row with which each block begins.
        blocks: of both main launches.
        parts: (first tile, tiles, first block, blocks) of the launch for flat params, then of the one for others.
    """

    table: Tensor
    owners: Tensor
    blocks: int
    parts: tuple[int, ...]


_plans = Cache()
_grads = Cache()


@cache
def cut(module: Any, n: int, m: int) -> Cut:
    return tuple(module.adamw_cut(n, m))


def upload(words: Sequence[int], like: Tensor) -> Tensor:
    """The words as an int64 tensor on the device of ``like``."""
    table = torch.empty(max(len(words), 1), dtype=torch.int64, device=like.device)
    core(like).upload_words(words, table.data_ptr(), *queue(like))
    return table


def plan_of(lists: Lists, steps: list[int], masks: list[int], layout: Layout, how: Cut, like: Tensor) -> tuple[Tables, Tensor]:
    """The plan of a call and the table of its gradients' addresses.

    ``steps`` and ``masks`` are addresses, 0 for a count on the host and where there is no held mask.
    """
    device = like.device
    addresses = [tuple(map(Tensor.data_ptr, xs)) for xs in lists]
    low = reduce(or_, chain(*addresses), 0)
    # if all are multiples of 16, nothing but their own table depends on the gradients' addresses
    kinds = None if low & 15 == 0 else tuple([address & 15 == 0 for address in addresses[GRAD]])
    key = (device, layout.key, tuple(steps), tuple(masks), how, kinds, *addresses[:GRAD])
    plan = _plans.get(key)
    if plan is None:
        plan = _make(lists, addresses, steps, masks, layout, how, like)
        _plans.put(key, plan, [plan.table, plan.owners], device)
    grads = _grads.get((device, addresses[GRAD]))
    if grads is None:
        grads = upload(addresses[GRAD], like)
        _grads.put((device, addresses[GRAD]), grads, [grads], device)
    return plan, grads


def _make(
    lists: Lists, addresses: Sequence[tuple[int, ...]], steps: list[int], masks: list[int], layout: Layout, how: Cut, like: Tensor
) -> Tables:
    fits = [all(a[i] & 15 == 0 for a in addresses if a) for i in range(len(steps))]
    flat = [i for i, p in enumerate(lists[P]) if how[2] and layout.walks[i] == FLAT and fits[i] and p.numel() % 4 == 0]
    words: list[int] = []
    parts: list[int] = []
    tiles = blocks = 0
    for indices in (flat, sorted({*range(len(steps))} - {*flat})):
        first = tiles
        for i in indices:
            p, walk = lists[P][i], layout.walks[i]
            cols = p.shape[-1] if p.dim() else 1
            rows = p.numel() // cols if cols else 0
            if walk == FLAT:
                rows, cols = 1, p.numel()
                strides = [cols, 1] * len(lists)
            else:
                strides = [s for xs in lists for s in ((row_stride(xs[i]) or 0, xs[i].stride(-1) if xs[i].dim() else 1) if xs else (0, 0))]
            wide = fits[i] and all(strides[2 * k] % 4 == 0 and strides[2 * k + 1] == 1 for k, xs in enumerate(lists) if xs)
            codes = DTYPES[p.dtype] | DTYPES[lists[GRAD][i].dtype] << 8
            count = -(-(rows * -(-cols // how[0])) // how[1])
            words += (*[a[i] if a else 0 for a in addresses[:GRAD]], masks[i], steps[i], rows, cols, tiles, count)
            words += (codes, wide | (walk == ACROSS) << 1, i, *strides)
            tiles += count
        parts += (first, tiles - first, blocks, tiles - first if how is TILES else min(BLOCKS, tiles - first))
        blocks += parts[-1]
    table = upload(words, like)
    owners = torch.empty(blocks, dtype=torch.int32, device=like.device)
    core(like).adamw_owners(table.data_ptr(), len(steps), *parts, owners.data_ptr(), *queue(like))
    return Tables(table, owners, blocks, tuple(parts))


def tiles_of(weights: list[Tensor], masks: Sequence[Tensor] | None, like: Tensor) -> Tables:
    """The 64 x 64 tiles of contiguous matrices, with the bits of their masks."""
    lists: Lists = [weights, [], [], [], weights]
    bits = [mask.data_ptr() for mask in masks] if masks else [0] * len(weights)
    return plan_of(lists, [0] * len(weights), bits, layout_of(lists, 2, 4, False, bool(masks), False), TILES, like)[0]


def _fits(args: tuple[Any, ...], device: str) -> Verdict:
    a = AdamWArgs(*args)
    verdict = supports_tensors(a)
    return runnable(placed(a), device) if verdict[0] else verdict


@register("nm_masked_adamw_", fits=_fits)
def masked_adamw_(*args: Any, out: Tensor | None = None) -> Tensor:
    """``nm_masked_adamw_``; a tensor that the kernels cannot walk in place is copied there and back."""
    return step(AdamWArgs(*args), out)


def step(a: AdamWArgs, out: Tensor | None, to: Forms | None = None) -> Tensor:
    """One step, which also writes the forms ``to`` if there are some."""
    a, d = with_plain_masks(a), to_device(a, out)
    if d.skip:
        return d.stats
    like = a.params[0] if a.params else a.hyper
    kernels = core(like)
    lists: Lists = [list(xs) for xs in (a.params, a.exp_avgs, a.exp_avg_sqs, a.max_exp_avg_sqs, a.grads)]
    how = cut(kernels, a.n, a.m) if to is None else TILES
    layout = layout_of(lists, a.n, a.m, how[2], bool(a.masks), a.stochastic)
    copies = []  # (tensor, copy) of what the step writes
    for which, i in layout.copies:
        original = lists[which][i]
        lists[which][i] = original.resolve_neg().contiguous()
        if which != GRAD:
            copies.append((original, lists[which][i]))
    addresses = [step.data_ptr() for step in a.steps]
    for i in d.host_steps:
        addresses[i] = 0
    masks = [mask.data_ptr() for mask in a.masks] if a.masks else [0] * len(a.steps)
    plan, gradients = plan_of(lists, addresses, masks, layout, how, like)
    count, several = advance(a.steps, d.host_steps)
    counts = None if several is None else upload(several, like)
    scalars = torch.empty(len(a.steps), SCALARS, dtype=torch.int32, device=d.device)
    partials = torch.empty(STATS, plan.blocks, dtype=torch.float64, device=d.device)
    host_hyper = a.hyper.tolist()[:8] if d.hyper is None else [0.0] * 8  # as many are used
    kernels.masked_adamw(
        plan.table.data_ptr(), gradients.data_ptr(), plan.owners.data_ptr(), scalars.data_ptr(), partials.data_ptr(), d.stats.data_ptr(),
        len(a.steps), *plan.parts, address(d.hyper), host_hyper, address(counts), count, address(d.grad_scale), address(d.found_inf),
        a.n, a.m, a.frozen, a.eps_inside, a.maximize, a.geometric, bool(a.max_exp_avg_sqs), bool(a.masks), a.fixed,
        a.stochastic, a.seed, DTYPES[a.exp_avgs[0].dtype] if a.exp_avgs else 0, *(to or Forms(0, 0, 0, 0, False, False)), *queue(like),
    )  # fmt: skip
    for target, copy in copies:
        target.copy_(copy)
    return d.stats
