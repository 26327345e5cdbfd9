"""The check of forms that an optimizer's step has written: whether the weight is still the one that they were made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..reference.adamw import mask_of
from ..reference.layouts import LAYOUTS
from ..reference.pack import pack
from .cuda.adamw_pack import SIDE
from .cuda.compress import SELECTS
from .cuda.core import core, queue
from .shared import address


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
