"""The forms of several weights in one pass over memory, alone or in MaskedAdamW's: for 2:4 and weights of whole 64 x 64 tiles.

``renew_changed_forms`` checks later whether a weight is still the one that they were made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...dispatch import Verdict
from ...reference.adamw import AdamWArgs, mask_of
from ...reference.adamw_pack import FormArgs, split
from ...reference.layouts import LAYOUTS
from ...reference.pack import pack
from ..adamw import placed, supports_tensors
from ..shared import address
from .adamw import Cache, Forms, step, tiles_of, upload
from .compress import SELECTS
from .core import DTYPES, core, queue, register, runnable

SIDE = 64
"""Rows and columns of a tile."""

_tables = Cache()


def _fits(args: tuple[Any, ...], device: str) -> Verdict:
    to, a = split(args)
    verdict = _supports(to, a)
    return runnable([*placed(a), *(x for part in to.parts for x in part[:1])], device) if verdict[0] else verdict


def _supports(to: FormArgs, a: AdamWArgs) -> Verdict:
    if not a.masks and (a.n, a.m) != (2, 4):
        return False, f"its kernel has the pattern 2:4, and this call {a.n}:{a.m}"
    if not to.indices:
        return False, "its kernel writes the positions too"
    if a.max_exp_avg_sqs or a.geometric or a.fixed or a.stochastic:
        return False, "its kernel has no amsgrad, no statistics of log |Δv|, no fixed weights and no stochastic rounding"
    verdict = _packs(to, a.params, a.exp_avgs, a.exp_avg_sqs)
    if not verdict[0]:
        return verdict
    if any(not x.is_contiguous() or x.is_neg() for x in a.grads):
        return False, "its kernel takes contiguous gradients"
    if len({x.dtype for x in a.grads}) > 1 or any(x.dtype not in (torch.float32, torch.bfloat16) for x in a.grads):
        return False, "its kernel takes gradients of one dtype, float32 or bfloat16"
    return supports_tensors(a)


def _fits_forms(args: tuple[Any, ...], device: str) -> Verdict:
    to, (weights, masks) = FormArgs(*args[:-2]), args[-2:]
    if any(not mask.is_contiguous() for mask in masks or ()):
        return False, "its kernel takes contiguous bits of masks"
    verdict = _packs(to, weights)
    return runnable([*weights, *(x for part in to.parts for x in part[:1])], device) if verdict[0] else verdict


def _packs(to: FormArgs, *lists: Sequence[Tensor]) -> Verdict:
    """Whether the kernels write such forms of weights that lie so, with other lists of their shapes."""
    if (to.n, to.m) != (2, 4):
        return False, f"its kernel has the pattern 2:4, and this call {to.n}:{to.m}"
    if not to.values or to.dtype != torch.bfloat16:
        return False, "its kernel makes forms in bfloat16, and always W packed"
    if to.values_t and to.dense:
        return False, "its kernel makes rows with columns or with the dense form, not all three"
    for tensors in lists:
        for x in tensors:
            if x.dtype != torch.float32 or not x.is_contiguous() or x.is_neg() or x.dim() != 2 or x.shape[0] % SIDE or x.shape[1] % SIDE:
                return False, f"its kernel takes contiguous float32 matrices of rows and columns that are multiples of {SIDE}"
    if any(not x.is_contiguous() or x.is_neg() for tensors in to.parts for x in tensors):
        return False, "its kernel writes contiguous forms"
    return True, ""


class _Placed:
    """Tensors at addresses that are multiples of 16: of others, copies, which ``finish`` copies back if they were written."""

    def __init__(self) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []

    def __call__(self, tensors: Sequence[Tensor], written: bool = True) -> list[Tensor]:
        result = list(tensors)
        for i, x in enumerate(result):
            if x.data_ptr() & 15:
                result[i] = x.clone()
                if written:
                    self.copies.append((x, result[i]))
        return result

    def finish(self) -> None:
        for target, copy in self.copies:
            target.copy_(copy)


def _forms(to: FormArgs, place: _Placed, gradient: int, like: Tensor) -> Forms:
    """The table of the forms in device memory, and what is the same for all."""
    parts = [place(part) for part in to.parts]
    words = [part[i].data_ptr() if part else 0 for i in range(len(to.values)) for part in (*parts, to.scales)]
    key = like.device, tuple(words)
    table = _tables.get(key)
    if table is None:
        table = upload(words, like)
        _tables.put(key, table, [table], like.device)
    select = SELECTS["given" if to.select == "held" else to.select]
    return Forms(table.data_ptr(), select, LAYOUTS.index(to.layout), gradient, bool(to.values_t), bool(to.dense))


@register("nm_pack_forms_", fits=_fits_forms)
def pack_forms_(*args: Any, out: None = None) -> None:
    """``nm_pack_forms_`` in one launch; a tensor whose address is not a multiple of 16 is copied there and back."""
    to, place, weights = FormArgs(*args[:-2]), _Placed(), args[-2]
    if not weights:
        return
    like = weights[0]
    forms, weights = _forms(to, place, 0, like), place(weights, written=False)
    plan = tiles_of(weights, args[-1], like)
    core(like).pack_forms(plan.table.data_ptr(), plan.owners.data_ptr(), plan.blocks, *forms[:3], *forms[4:], *queue(like))
    place.finish()


@register("nm_masked_adamw_pack_", fits=_fits)
def masked_adamw_pack_(*args: Any, out: Tensor | None = None) -> Tensor:
    """``nm_masked_adamw_pack_``; a tensor whose address is not a multiple of 16 is copied there and back."""
    (to, a), place = split(args), _Placed()
    like = a.params[0] if a.params else a.hyper
    forms = _forms(to, place, DTYPES[a.grads[0].dtype] if a.grads else 0, like)
    a = a._replace(
        params=place(a.params), exp_avgs=place(a.exp_avgs), exp_avg_sqs=place(a.exp_avg_sqs), grads=place(a.grads, written=False)
    )  # fmt: skip
    stats = step(a, out, forms)
    place.finish()
    return stats


def renew_changed_forms(w: Tensor, bits: Tensor | None, rule: str, scale: Tensor | None, forms: Any, changed: Tensor, count: int) -> None:
    """Compare one row in 64 of a weight with its packed values, and if some differ make all forms again; the host does not wait.

    Args:
        w: ``(out, in)``, as ``nm_masked_adamw_pack_`` takes it in one pass.
        bits, rule, scale: its mask, rule and scale there.
        forms: its ``Packed``, with rows, which is overwritten.
        changed: int32 ``(1,)``; becomes count + 1 if a row differs.
        count: of checks so far; the row changes with it.
    """
    strip, mark = count % min(SIDE, len(w)), count + 1
    parts = (*forms.buffers(), forms.dense)
    if w.is_cuda:
        select = SELECTS["given" if rule == "held" else rule]
        core(w).renew_changed_forms(
            w.data_ptr(), *w.shape, address(bits), select, LAYOUTS.index(forms.layout), *map(address, parts), address(scale), strip,
            changed.data_ptr(), mark, *queue(w),
        )  # fmt: skip
        return
    p, dtype = forms.rows.pattern, forms.rows.values.dtype
    rows = slice(strip, None, SIDE)
    some = None if bits is None else mask_of(bits[rows], w.shape[1])
    if not torch.equal(_bits(pack(w[rows], p.n, p.m, rule, some, scale, dtype)[0]), _bits(parts[0][rows])):
        changed.fill_(mark)
        mask = None if bits is None else mask_of(bits, w.shape[1])
        made = pack(w, p.n, p.m, rule, mask, scale, dtype, True, parts[2] is not None, forms.layout, parts[4] is not None)
        for part, new in zip(parts, made, strict=True):
            if part is not None:
                part.copy_(new)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)
