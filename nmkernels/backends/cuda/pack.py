"""pack: a weight along its rows, its columns or both from one read of it, and the layouts of tensor cores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...dispatch import Verdict
from ...reference.layouts import meta_shape, to_layout
from ..shared import only_2_4, packed
from .compress import Operand, check_flag, flag_for, start
from .core import aligned, register
from .groups import transposable_mask


def supports_pack(w: Tensor, n: int, m: int, select: str, *rest: Any) -> Verdict:
    if rest[2] == torch.float64:
        return False, "it computes in float32, and this call packs float64"
    return only_2_4(n, m) if select == "transposable" else (True, "")


def _operand(w: Tensor, rows: int, cols: int, n: int, m: int, dtype: torch.dtype, layout: str) -> Operand:
    values, indices = packed(w, (rows,), cols, n, m, dtype)
    return values, indices if layout == "canonical" else w.new_empty(meta_shape(rows, cols, layout), dtype=torch.int32)


@register("nm_pack", supports_pack)
def pack(
    w: Tensor, n: int, m: int, select: str, mask: Tensor | None, scale: Tensor | None,
    dtype: torch.dtype | None, rows: bool, columns: bool, layout: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``nm_pack``. One kernel and one read of the weight for the usual patterns; both ways at once is for 2:4.

    Two launches: both ways by a given mask of another pattern. A transposable mask goes through memory first where rows or columns are
    no multiples of 32. Any pattern, shape and pair of dtypes is done, if by slower kernels: the usual ones are those of
    ``core/dispatch.h`` and fp32 to fp32, bf16 or fp16, or 16 bits as they are. A given mask is checked after the fact, for which the host
    waits; inside a graph's capture it is not checked, and one that is held never.
    """
    if not w.is_contiguous() and w.t().is_contiguous():  # its columns are the rows in memory
        swapped = pack(w.t(), n, m, select, None if mask is None else mask.t(), scale, dtype, columns, rows, layout)
        return *swapped[2:], *swapped[:2]
    (height, width), kept = w.shape, dtype or w.dtype
    w, mask = aligned(w), None if mask is None else aligned(mask)
    flag, checked = flag_for(mask), select != "held"
    select = select if checked else "given"

    def run(select: str, mask: Tensor | None, layout: str) -> tuple[bool, list[Operand | None]]:
        along = _operand(w, height, width, n, m, kept, layout) if rows else None
        down = _operand(w, width, height, n, m, kept, layout) if columns else None
        return start(w, n, m, select, mask, scale, along, down, layout, flag), [along, down]

    done, operands = run(select, mask, layout)
    if not done and select == "transposable":
        select, mask = "given", transposable_mask(w, n, m)
        done, operands = run(select, mask, layout)
    if not done:
        _, operands = run(select, mask, "canonical")
        operands = [o and (o[0], to_layout(o[1], size, layout)) for o, size in zip(operands, (width, height), strict=True)]
    if checked:
        check_flag("pack", flag, n, m)
    nothing = w.new_empty(0, dtype=kept), w.new_empty(0, dtype=torch.uint8 if layout == "canonical" else torch.int32)
    return *(operands[0] or nothing), *(operands[1] or nothing)
