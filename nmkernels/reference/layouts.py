"""Device layouts: the orders in which tensor cores read the positions of a 2:4 operand, as permutations of the bytes of the indices.

For 16-bit operands a *metadata word* is 16 bits: the nibbles of four groups of four, lowest first, each
``first kept | second kept << 2``. That is two bytes of canonical 2:4 indices, which cover 16 dense columns of one row.

* ``"mma.sp"``, for ``mma.sp.m16n8k32``: int32 ``(rows/16, cols/64, 32)``. Word ``[i, j, lane]`` holds, for the columns
  ``64j + 16(lane % 4) ... + 15``, the metadata word of row ``16i + lane // 4`` in its low half, that of the row 8 below in its high half.
  So one 32-lane load feeds two instructions: lanes with ``lane % 4`` 0 and 1 hold columns 64j ... + 31, read with sparsity selector 0;
  those with 2 and 3 the next 32 columns, read with selector 1.
* ``"wgmma.sp"``, for ``wgmma.mma_async.sp`` m64nNk32: int32 ``(rows/64, cols/64, 128)``. Word ``[i, j, 32·warp + lane]`` is the ``mma.sp``
  word of the rows ``16(4i + warp)``, the same lane and columns.

For 8-bit operands a word is 32 bits, eight groups of one row, as in the canonical indices:

* ``"wgmma.sp.8bit"``, for ``wgmma.mma_async.sp`` m64nNk64: int32 ``(rows/64, cols/128, 256)``. Word
  ``[i, j, 128s + 32·warp + lane]`` is that of row ``64i + 16·warp + lane // 4 + 8(lane % 2)`` for the columns
  ``128j + 64s + 32(lane // 2 % 2) ... + 31``: the operand of each thread for instruction s = 0 or 1 of 128 columns, with sparsity selector
  0 (PTX ISA 9.7.15.6.2).

The only nibbles are 0x4, 0x8, 0xC, 0x9, 0xD and 0xE, which the PTX manual calls ordered metadata: canonical indices are sorted, also where
they pad a short group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..pattern import Pattern

EIGHT_BIT = "wgmma.sp.8bit"
"""The layout for 8-bit values; the other device layouts are for 16-bit ones."""

WARPS = {"mma.sp": 1, "wgmma.sp": 4, EIGHT_BIT: 4}
"""Device layouts → number of warps whose words are contiguous."""

LAYOUTS = ("canonical", *WARPS)
"""All layouts of a packed operand."""

COLUMNS = 64
"""Dense columns covered by the words of one warp for 16-bit values; twice as many for 8-bit ones, see ``tile_of``."""


def tile_of(layout: str) -> tuple[int, int]:
    """Rows and columns of a tile of a device layout."""
    return 16 * WARPS[layout], COLUMNS * (2 if layout == EIGHT_BIT else 1)


def meta_shape(rows: int, cols: int, layout: str) -> tuple[int, int, int]:
    """The shape of the metadata of a ``(rows, cols)`` operand in a device layout."""
    height, width = tile_of(layout)
    return rows // height, cols // width, height * width // 32


def operand_shapes(pattern: Pattern, rows: int, cols: int, layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the values and of the indices, or metadata, of a dense ``(rows, cols)``."""
    indices = (rows, pattern.index_bytes(cols)) if layout == "canonical" else meta_shape(rows, cols, layout)
    return (rows, cols // pattern.m * pattern.n), indices


def index_dtype(layout: str) -> torch.dtype:
    return torch.uint8 if layout == "canonical" else torch.int32


def layout_of(indices: Tensor) -> str:
    """The layout of a packed matrix's positions, from their dtype and last size."""
    if indices.dtype != torch.int32:
        return "canonical"
    words = indices.shape[-1]  # a symbol in a graph, so not usable as a dict key
    return "wgmma.sp" if words == 128 else EIGHT_BIT if words == 256 else "mma.sp"


def _split(rows: int, cols: int, layout: str) -> tuple[list[int], list[int]]:
    """The sizes of what the bytes of canonical indices are split into, and their order in the layout."""
    height, width = tile_of(layout)
    i, j, warps = rows // height, cols // width, WARPS[layout]
    if layout == EIGHT_BIT:
        # tile, warp, half of its rows, row of eight, 128 columns, instruction, half of its columns, byte
        return [i, warps, 2, 8, j, 2, 2, 4], [0, 4, 5, 1, 3, 6, 2, 7]
    # tile, warp, half, row of eight, 64 columns, lane of four, byte
    return [i, warps, 2, 8, j, 4, 2], [0, 4, 1, 3, 5, 2, 6]


def to_layout(indices: Tensor, cols: int, layout: str) -> Tensor:
    """Canonical 2:4 indices, uint8 ``(rows, cols/8)``, in another layout; the module docstring defines the order of the words."""
    if layout == "canonical":
        return indices
    sizes, order = _split(len(indices), cols, layout)
    i, j, words = meta_shape(len(indices), cols, layout)
    transposed = indices.reshape(sizes).permute(order).reshape(i, j, words * 4)
    return transposed.clone().view(torch.int32)  # clone: an empty view may start at an odd address


def from_layout(meta: Tensor, layout: str) -> Tensor:
    """The inverse of ``to_layout``: canonical indices uint8 ``(rows, cols/8)`` from metadata; for ``"canonical"`` the argument."""
    if layout == "canonical":
        return meta
    height, width = tile_of(layout)
    rows, cols = meta.shape[0] * height, meta.shape[1] * width
    sizes, order = _split(rows, cols, layout)
    split = meta.contiguous().view(torch.uint8).reshape([sizes[dim] for dim in order])
    return split.permute([order.index(dim) for dim in range(len(order))]).reshape(rows, cols // 8)
