"""compress, decompress and pack: the canonical N:M form and tensor-core layouts, along rows, columns or both, and dense."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...dispatch import Verdict
from ...reference.layouts import LAYOUTS, meta_shape, to_layout
from ..shared import address, aligned, check_flag, contiguous, flag_for, only_2_4, packed
from .core import DTYPES, core, queue, register
from .groups import transposable_mask

SELECTS = {"magnitude": 0, "transposable": 1, "given": 2, "threshold": 3}
"""The kernels' code for each rule that chooses the kept weights."""

Operand = tuple[Tensor, Tensor]
"""Values and indices."""


@register("nm_compress")
def compress(w: Tensor, n: int, m: int, mask: Tensor | None = None, out: Operand | None = None) -> Operand:
    """``nm_compress``. A given mask is checked afterwards."""
    w, shape, dtype = contiguous(w), w.shape, DTYPES[w.dtype]
    cols, numel = shape[-1], w.numel()
    if out is None:
        out = packed(w, shape[:-1], cols, n, m)
    values, indices = out
    select, explicit, flag = (0, None, None) if mask is None else (SELECTS["given"], mask.contiguous(), flag_for(mask))
    core(w).pack(
        w.data_ptr(), dtype, numel // cols if cols else 0, cols, n, m, select, address(explicit), 0,
        address(flag), dtype, 0, values.data_ptr(), indices.data_ptr(), 0, 0, 0, *queue(w),
    )  # fmt: skip
    check_flag("compress", flag, n, m)
    return out


@register("nm_decompress")
def decompress(values: Tensor, indices: Tensor, n: int, m: int, cols: int, out: Tensor | None = None) -> Tensor:
    """``nm_decompress``. Indices are not checked, which would synchronise; an out-of-range one writes nothing."""
    values, indices = contiguous(values), indices.contiguous()
    dense = values.new_empty(*values.shape[:-1], cols) if out is None else out
    rows = dense.numel() // cols if cols else 0
    core(values).decompress(values.data_ptr(), indices.data_ptr(), DTYPES[values.dtype], rows, cols, n, m, dense.data_ptr(), *queue(values))
    return dense


@register("nm_metadata")
def metadata(indices: Tensor, cols: int, layout: str, out: Tensor | None = None) -> Tensor:
    """``nm_metadata``. Reads the indices once, at any alignment."""
    rows, indices = indices.shape[0], indices.contiguous()
    meta = indices.new_empty(meta_shape(rows, cols, layout), dtype=torch.int32) if out is None else out
    core(indices).metadata(indices.data_ptr(), rows, cols, LAYOUTS.index(layout), meta.data_ptr(), *queue(indices))
    return meta


def supports_pack(w: Tensor, n: int, m: int, select: str, *_: Any) -> Verdict:
    return only_2_4(n, m) if select == "transposable" else (True, "")


def _operand(w: Tensor, rows: int, cols: int, n: int, m: int, dtype: torch.dtype, layout: str) -> Operand:
    if layout == "canonical":
        return packed(w, (rows,), cols, n, m, dtype)
    return w.new_empty(rows, cols // m * n, dtype=dtype), w.new_empty(meta_shape(rows, cols, layout), dtype=torch.int32)


@register("nm_pack", supports_pack)
def pack(
    w: Tensor, n: int, m: int, select: str, mask: Tensor | None, scale: Tensor | None,
    dtype: torch.dtype | None, rows: bool, columns: bool, layout: str, dense: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``nm_pack``: one kernel and one read of the weight for the common patterns; of 2:4, rows with columns or with the dense form.

    Rows and columns with a given mask of another pattern take two launches. A transposable mask is first written to memory if rows or
    columns are not multiples of 32. Every pattern, shape and pair of dtypes is supported, some by slower kernels; the common ones are those
    of ``core/dispatch.h`` with fp32 to fp32, bf16 or fp16, or 16 bits unchanged. A given mask is checked afterwards, which synchronises,
    but not during graph capture, and a held mask never.
    """
    if not dense and not w.is_contiguous() and w.t().is_contiguous():  # a transposed weight: its columns are contiguous
        *swapped, spread = pack(w.t(), n, m, select, None if mask is None else mask.t(), scale, dtype, columns, rows, layout)
        return *swapped[2:], *swapped[:2], spread
    (height, width), out_dtype = w.shape, dtype or w.dtype
    w, mask = aligned(w), None if mask is None else aligned(mask)
    flag, checked = flag_for(mask), select != "held"
    select = select if checked else "given"

    def run(rows: bool, columns: bool, layout: str, spread: Tensor | None = None) -> tuple[bool, list[Operand | None]]:
        """Whether a single kernel can do it, and the results."""
        along = _operand(w, height, width, n, m, out_dtype, layout) if rows else None
        down = _operand(w, width, height, n, m, out_dtype, layout) if columns else None
        addresses = [address(x) for x in (mask, scale, flag, *(along or (None, None)), *(down or (None, None)), spread)]
        done = core(w).pack(
            w.data_ptr(), DTYPES[w.dtype], height if width else 0, width, n, m, SELECTS[select], *addresses[:3],
            DTYPES[out_dtype], LAYOUTS.index(layout), *addresses[3:], *queue(w),
        )  # fmt: skip
        return done, [along, down]

    spread = w.new_empty(height, width, dtype=out_dtype) if dense else None
    done, operands = run(rows, columns, layout, spread)
    if not done and select == "transposable":
        select, mask = "given", transposable_mask(w, n, m)
        done, operands = run(rows, columns, layout, spread)
    if not done and spread is not None:
        if rows or columns:
            done, operands = run(rows, columns, layout)
        else:
            done = True
        if not run(False, False, layout, spread)[0]:
            along = operands[0] if done and rows and layout == "canonical" else run(True, False, "canonical")[1][0]
            assert along is not None
            decompress(*along, n, m, width, out=spread)
    if not done:
        _, operands = run(rows, columns, "canonical")
        operands = [o and (o[0], to_layout(o[1], size, layout)) for o, size in zip(operands, (width, height), strict=True)]
    if checked:
        check_flag("pack", flag, n, m)
    positions = torch.uint8 if layout == "canonical" else torch.int32
    parts = [o or (w.new_empty(0, dtype=out_dtype), w.new_empty(0, dtype=positions)) for o in operands]
    return *parts[0], *parts[1], w.new_empty(0, dtype=out_dtype) if spread is None else spread
