"""What MaskedAdamW's host side is on every GPU: how params lie, what the host counts, and tables on the device that are found again.

A ``Layout`` depends on shapes, strides and dtypes alone and says how each param can be walked. A backend makes its plan of it, which
adds the addresses and lives on the device, and keeps that in a ``Cache``.

Step counts on the CPU, torch's default, are advanced there and travel as an argument. With ``found_inf`` on the device the host must then
know whether the step is skipped: it waits for that one element, as ``torch.optim.AdamW`` with a ``GradScaler`` does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..dispatch import Verdict
from ..pattern import BackendError
from .tensors import row_stride

P, AVG, SQ, TOP, OUT, GRAD = range(6)
"""The lists of a call, in the order of the kernels' tables."""

ALIGNED, FLAT, ALONG, ACROSS = range(4)
"""How a param lies, the flat ones first: flat with 16-byte accesses; flat; strided with neighbours along a group, or across groups."""

KEPT = 128
"""Tables that a cache holds; a training step uses two per parameter group and per kind of parameter."""

Lists = list[list[Tensor]]


def of_one_kind(params: Sequence[Tensor], grads: Sequence[Tensor], outs: Sequence[Tensor]) -> Verdict:
    """What a call must have in common: fp32 arithmetic and one device.

    It is asked at every step about hundreds of params, so it looks at nothing that the op has compared with them already.
    """
    for name, xs in (("param", params), ("gradient", grads), ("output", outs)):
        if torch.float64 in {x.dtype for x in xs}:
            return False, f"it computes in float32, and a {name} is float64"
    if len({x.device for x in params}) > 1:
        return False, "it steps the params of one device at once, and these are on several"
    return True, ""


def dense(x: Tensor) -> bool:
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


def strides_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """Row stride and column stride of each tensor of a param that is not flat, in elements; zeros for one that is not there."""
    pairs = [(row_stride(x) or 0, x.stride(-1) if x.dim() else 1) if x is not None else (0, 0) for x in tensors]
    return list(chain(*pairs))


def written(lists: Lists, layout: Layout) -> Iterator[tuple[Tensor, Tensor]]:
    """Replaces the tensors that fit no walk by copies in ``lists``; yields (tensor, copy) of those that the step writes."""
    for which, i in layout.copies:
        original = lists[which][i]
        lists[which] = [*lists[which][:i], original.resolve_neg().contiguous(), *lists[which][i + 1 :]]
        if which != GRAD:
            yield original, lists[which][i]


def on_host(x: Tensor, device: torch.device) -> bool:
    """Whether ``x`` is held by the host while the params are on a GPU."""
    return x.device != device and x.is_cpu


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph records what is launched now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def skipped(found_inf: Tensor | None, device: torch.device) -> bool:
    """Whether the step that the host is about to count is skipped; this waits for the device."""
    if capturing(device):
        raise BackendError(
            "nm_masked_adamw_: a CUDA graph is captured and the step counts are on the CPU, so that replays would not count; "
            "make the optimizer with capturable=True."
        )
    return found_inf is not None and bool(found_inf != 0)


def count(steps: Sequence[Tensor], held: list[int]) -> tuple[int, list[int] | None]:
    """Counts the steps that the host holds; returns the one count of all of them, and where there are several one for every param."""
    if not held:
        return 0, None
    torch._foreach_add_([steps[i] for i in held], torch.ones(()))  # wrapped once: a number would be, per step
    values = {i: int(steps[i].item()) for i in held}  # tensors on the CPU: nothing is waited for
    one = values[held[0]]
    return one, [values.get(i, 0) for i in range(len(steps))] if len(set(values.values())) > 1 else None


class Cache:
    """Things on a device by the words that they were made of; the ones used longest ago are dropped.

    While a graph is captured nothing is added, because what is made then exists only in replays; and what is taken is never
    dropped, because the graph reads its memory ever after.
    """

    def __init__(self) -> None:
        self.entries: OrderedDict[Hashable, Any] = OrderedDict()
        self.pinned: dict[Hashable, Any] = {}

    def get(self, key: Hashable, device: torch.device) -> Any:
        """What was made for ``key``, or None."""
        found = self.entries.get(key)
        if found is None:
            return self.pinned.get(key)
        self.entries.move_to_end(key)
        if capturing(device):
            self.pinned[key] = found
        return found

    def put(self, key: Hashable, value: Any, device: torch.device) -> Any:
        """Keep ``value`` for the next call, unless this one is captured."""
        if not capturing(device):
            self.entries[key] = value
            if len(self.entries) > KEPT:
                self.entries.popitem(last=False)
        return value


__all__ = [
    "ACROSS", "ALIGNED", "ALONG", "AVG", "FLAT", "GRAD", "KEPT", "OUT", "SQ", "TOP", "Cache", "Layout", "Lists", "P",
    "capturing", "count", "dense", "layout_of", "of_one_kind", "on_host", "skipped", "strides_of", "written",
]  # fmt: skip
