"""compress and decompress: dense to the canonical N:M form and back; canonical 2:4 indices in the order of tensor cores."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.layouts import LAYOUTS, meta_shape
from ..shared import address, contiguous, overfull, packed
from .core import DTYPES, core, queue, register

SELECTS = {"magnitude": 0, "transposable": 1, "given": 2, "threshold": 3}
"""The kernels' codes of what decides which weights are kept."""

Operand = tuple[Tensor, Tensor]
"""Values and indices."""


def start(
    w: Tensor, n: int, m: int, select: str, mask: Tensor | None, scale: Tensor | None, rows: Operand | None, columns: Operand | None,
    layout: str = "canonical", overfull: Tensor | None = None,
) -> bool:  # fmt: skip
    """Start the kernels that write the operands of a contiguous ``w (..., cols)``; False if there are none that do it at once.

    ``overfull``: int32, set to 1 where a given mask keeps more than n in a group of an operand.
    """
    cols = w.shape[-1]
    operands = (*(rows or (None, None)), *(columns or (None, None)))
    dtype = next(x.dtype for x in operands if x is not None)
    addresses = [address(x) for x in (mask, scale, overfull, *operands)]
    return core(w).pack(
        w.data_ptr(), DTYPES[w.dtype], w.numel() // cols if cols else 0, cols, n, m, SELECTS[select], *addresses[:3],
        DTYPES[dtype], LAYOUTS.index(layout), *addresses[3:], *queue(w),
    )  # fmt: skip


def flag_for(mask: Tensor | None) -> Tensor | None:
    """What ``start`` sets where a mask keeps too many."""
    return None if mask is None else torch.zeros(1, dtype=torch.int32, device=mask.device)


def check_flag(op: str, flag: Tensor | None, n: int, m: int) -> None:
    """Raise where it is set, for which the host waits; inside a graph's capture it is not looked at."""
    if flag is None or (flag.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    if flag.item():
        raise overfull(op, n, m)


@register("nm_compress")
def compress(w: Tensor, n: int, m: int, mask: Tensor | None = None, out: Operand | None = None) -> Operand:
    """``nm_compress``. A given mask is checked after the fact."""
    # not by way of start: the host's time counts in an op as short as this
    w, shape, dtype = contiguous(w), w.shape, DTYPES[w.dtype]
    cols, numel = shape[-1], w.numel()
    if out is None:
        out = packed(w, shape[:-1], cols, n, m)
    values, indices = out
    select, given, flag = (0, None, None) if mask is None else (SELECTS["given"], mask.contiguous(), flag_for(mask))
    core(w).pack(
        w.data_ptr(), dtype, numel // cols if cols else 0, cols, n, m, select, address(given), 0,
        address(flag), dtype, 0, values.data_ptr(), indices.data_ptr(), 0, 0, *queue(w),
    )  # fmt: skip
    if flag is not None:
        check_flag("compress", flag, n, m)
    return out


@register("nm_decompress")
def decompress(values: Tensor, indices: Tensor, n: int, m: int, cols: int, out: Tensor | None = None) -> Tensor:
    """``nm_decompress``. Indices are not checked, which would make the host wait: one outside its group writes nothing."""
    values, indices = contiguous(values), indices.contiguous()
    dense = values.new_empty(*values.shape[:-1], cols) if out is None else out
    rows = dense.numel() // cols if cols else 0
    core(values).decompress(values.data_ptr(), indices.data_ptr(), DTYPES[values.dtype], rows, cols, n, m, dense.data_ptr(), *queue(values))
    return dense


@register("nm_metadata")
def metadata(indices: Tensor, cols: int, layout: str, out: Tensor | None = None) -> Tensor:
    """``nm_metadata``. One read of the indices, for which no address is too odd."""
    rows, indices = indices.shape[0], indices.contiguous()
    meta = indices.new_empty(meta_shape(rows, cols, layout), dtype=torch.int32) if out is None else out
    core(indices).metadata(indices.data_ptr(), rows, cols, LAYOUTS.index(layout), meta.data_ptr(), *queue(indices))
    return meta
