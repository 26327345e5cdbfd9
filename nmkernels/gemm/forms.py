"""The forms in which a weight, or a gradient's estimate, can be multiplied: in dense layout, or compressed in some order."""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch import Tensor

from .. import dispatch
from ..dispatch import preferred_layout
from ..ops import tensor_core_pattern
from ..pattern import BackendError, Pattern
from ..reference.layouts import COLUMNS, meta_shape, tile_of

CANONICAL = "canonical"
"""The order of packed weights on disk and on a CPU; where tensor cores multiply them it is that of ``layout_on``."""

TALL = 16
"""Rows of a warp's tile in the orders of tensor cores; ``COLUMNS`` is its width."""


@lru_cache(maxsize=1024)
def forms(
    rows: int, cols: int, n: int, m: int, dtype: torch.dtype, device: torch.device, dense: bool = True, columns: bool = False
) -> tuple[str, ...]:
    """The forms that a weight ``(rows, cols)`` can have on a device, for ``Problem.forms``.

    Args:
        dense: the dense layout is available too.
        columns: Wᵀ is packed, for a mask that is transposable; W otherwise.
    """
    name, height, width = ("columns", cols, rows) if columns else ("rows", rows, cols)
    tiles = height % TALL == 0 and width % COLUMNS == 0 and dtype.itemsize == 2 and tensor_core_pattern(Pattern(n, m))
    cores = (f"{name}:{layout_on(device, height)}",) if device.type == "cuda" and tiles else ()
    return (*(("dense",) if dense else ()), name, *cores)


def layout_on(device: torch.device, *rows: int) -> str:
    """The order of metadata in which operands of so many rows are packed for the tensor cores of a device.

    It is that of ``wgmma.sp`` where its kernel runs, which kernels of ``mma.sp`` read as well; else that of ``mma.sp``.
    """
    layout = _preferred(device)
    return layout if not any(count % tile_of(layout)[0] for count in rows) else "mma.sp"


def _preferred(device: torch.device) -> str:
    return preferred_layout("nm_linear", device) or "mma.sp"


def layout_for(weight: Tensor, pattern: Pattern, dtype: torch.dtype, columns: bool) -> str:
    """The order in which a packed weight is kept: that of tensor cores where a kernel multiplies it on this device, else the canonical."""
    if dtype.itemsize != 2 or not tensor_core_pattern(pattern):
        return CANONICAL
    rows, cols = weight.shape
    if rows % TALL or cols % COLUMNS or (columns and (cols % TALL or rows % COLUMNS)):
        return CANONICAL
    layout = layout_on(weight.device, rows, *((cols,) if columns else ()))
    return layout if _multiplies(weight.device, dtype, layout, dispatch.forced_backend() or "") else CANONICAL


def _multiplies(device: torch.device, dtype: torch.dtype, layout: str, forced: str) -> bool:
    """Whether a backend other than the reference multiplies operands in that order."""
    return _multiplied(device, dtype, layout, forced)


# tracing calls them and keeps the answer; it would trace into a function with a cache, and the dispatcher cannot be traced
_preferred._dynamo_marked_constant = True  # type: ignore[attr-defined]
_multiplies._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _multiplied(device: torch.device, dtype: torch.dtype, layout: str, forced: str) -> bool:
    rows, _ = tile_of(layout)
    values = torch.empty(rows, COLUMNS // 2, dtype=dtype, device=device)
    meta = torch.empty(meta_shape(rows, COLUMNS, layout), dtype=torch.int32, device=device)
    try:
        return dispatch.choose("nm_linear", values.new_empty(TALL, COLUMNS), values, meta, 2, 4, COLUMNS).backend != "reference"
    except BackendError:  # the forced one does not
        return False
