"""The forms in which a weight, or an estimate of a gradient, can be multiplied: dense, or compressed in one of several layouts."""

from __future__ import annotations

from functools import cache, lru_cache

import torch

from .. import dispatch
from ..dispatch import preferred_layout
from ..ops.pack import tensor_core_pattern
from ..pattern import BackendError, Pattern
from ..reference.layouts import COLUMNS, meta_shape, tile_of

CANONICAL = "canonical"
"""The layout of packed weights on disk and on CPUs; for tensor cores see ``layout_on``."""

TALL = 16
"""Rows of a warp's tile in tensor-core layouts; ``COLUMNS`` is its width."""


@lru_cache(maxsize=1024)
def forms(
    rows: int, cols: int, n: int, m: int, dtype: torch.dtype, device: torch.device, dense: bool = True, columns: bool = False
) -> tuple[str, ...]:
    """The forms that a weight ``(rows, cols)`` can have on a device, for ``Problem.forms``.

    Args:
        dense: whether the dense layout is available too.
        columns: whether Wᵀ is packed (for a transposable mask) instead of W.
    """
    name, height, width = ("columns", cols, rows) if columns else ("rows", rows, cols)
    tiles = height % TALL == 0 and width % COLUMNS == 0 and dtype.itemsize == 2 and tensor_core_pattern(Pattern(n, m))
    cores = (f"{name}:{layout_on(device, height)}",) if device.type == "cuda" and tiles else ()
    return (*(("dense",) if dense else ()), name, *cores)


def layout_on(device: torch.device, *rows: int) -> str:
    """The layout in which operands with ``rows`` rows are packed for the tensor cores of a device.

    ``wgmma.sp`` on GPUs that have that instruction (kernels for ``mma.sp`` read it too), else ``mma.sp``.
    """
    layout = _preferred(device)
    return layout if not any(count % tile_of(layout)[0] for count in rows) else "mma.sp"


def _preferred(device: torch.device) -> str:
    return preferred_layout("nm_linear", device) or "mma.sp"


def layout_for(shape: tuple[int, int], device: torch.device, pattern: Pattern, dtype: torch.dtype, columns: bool) -> str:
    """The layout of a packed weight of this shape: a tensor-core layout if a kernel on this device multiplies it, else canonical."""
    if dtype.itemsize != 2 or not tensor_core_pattern(pattern):
        return CANONICAL
    rows, cols = shape
    if rows % TALL or cols % COLUMNS or (columns and (cols % TALL or rows % COLUMNS)):
        return CANONICAL
    layout = layout_on(device, rows, *((cols,) if columns else ()))
    return layout if multiplies(device, dtype, layout) else CANONICAL


def multiplies(device: torch.device, dtype: torch.dtype, layout: str) -> bool:
    """Whether a backend other than the reference multiplies operands in this layout, or the one that is forced does."""
    return _multiplies(device, dtype, layout, dispatch.forced_backend() or "")


def _multiplies(device: torch.device, dtype: torch.dtype, layout: str, forced: str) -> bool:
    return _has_kernel(device, dtype, layout, forced)


# tracing calls them and keeps the results as constants; it would trace into a cached function, and the dispatcher cannot be traced
_preferred._dynamo_marked_constant = True  # type: ignore[attr-defined]
_multiplies._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _has_kernel(device: torch.device, dtype: torch.dtype, layout: str, forced: str) -> bool:
    rows, _ = tile_of(layout)
    values = torch.empty(rows, COLUMNS // 2, dtype=dtype, device=device)
    meta = torch.empty(meta_shape(rows, COLUMNS, layout), dtype=torch.int32, device=device)
    try:
        return dispatch.choose("nm_linear", values.new_empty(TALL, COLUMNS), values, meta, 2, 4, COLUMNS).backend != "reference"
    except BackendError:  # the forced backend has no such kernel
        return False
