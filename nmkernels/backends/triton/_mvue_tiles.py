"""Device functions that bring MVUE's tiles: the uniforms of their groups, and matrices whose groups lie down the columns."""

from __future__ import annotations

import triton
import triton.language as tl

from ._mvue_small import appended
from ._philox import pairs24, uniforms24, uniforms24_of_four


@triton.jit
def wide(x):
    """A 64-bit integer, also of an argument that Triton has made a constant."""
    return tl.full([], 0, tl.int64) + x


@triton.jit
def row_uniforms(seed, first, TILE: tl.constexpr, SHARED: tl.constexpr, APPROX: tl.constexpr):
    """The uniforms of groups first, first + 1, ...; SHARED: first is a multiple of 4."""
    if APPROX:
        return pairs24(seed, first + tl.arange(0, TILE))
    else:
        if SHARED:
            u = tl.reshape(uniforms24_of_four(seed, first // 4 + tl.arange(0, TILE // 4)), [TILE])
        else:
            u = uniforms24(seed, first + tl.arange(0, TILE))
        return u, u


@triton.jit
def place_uniforms(seed, line, first, per_line, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, SHARED: tl.constexpr):
    """The uniforms of groups first, ... of lines line, ..., ``[GROUPS, COLUMNS]``; group g of line l has index l * per_line + g.

    SHARED: first and per_line are multiples of 4.
    """
    start = (line + tl.arange(0, COLUMNS)) * per_line + first
    if SHARED:
        fours = uniforms24_of_four(seed, (start // 4)[None, :] + tl.arange(0, GROUPS // 4)[:, None])
        return tl.reshape(tl.permute(fours, [0, 2, 1]), [GROUPS, COLUMNS])
    else:
        return uniforms24(seed, start[None, :] + tl.arange(0, GROUPS)[:, None])


@triton.jit
def column_uniforms(seed, line, first, per_line, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, APPROX: tl.constexpr):
    """``place_uniforms`` as ``[GROUPS * COLUMNS]``, for either method."""
    i = tl.arange(0, GROUPS * COLUMNS)
    j = (line + i % COLUMNS) * per_line + first + i // COLUMNS
    if APPROX:
        return pairs24(seed, j)
    else:
        u = uniforms24(seed, j)
        return u, u


@triton.jit
def load_places(g, column, first, length, inner, M: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
    """Groups first, ... of columns column, ... of a matrix ``(length, inner)`` as M tensors ``[GROUPS, COLUMNS]``; zeros past its edges."""
    columns = column + tl.arange(0, COLUMNS)
    row = (first + tl.arange(0, GROUPS)[:, None]) * M
    at = g + row * inner + columns[None, :]
    out = ()
    for i in tl.static_range(M):
        out = appended(out, tl.load(at + i * wide(inner), mask=(columns < inner)[None, :] & (row < length - i), other=0.0))
    return out


@triton.jit
def store_places(out, xs, column, first, length, inner):
    """The inverse of ``load_places``."""
    columns = column + tl.arange(0, xs[0].shape[1])
    row = (first + tl.arange(0, xs[0].shape[0])[:, None]) * len(xs)
    at = out + row * inner + columns[None, :]
    for i in tl.static_range(len(xs)):
        tl.store(at + i * wide(inner), xs[i], mask=(columns < inner)[None, :] & (row < length - i))


@triton.jit
def _column_places(column, first, length, inner, M: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr):
    """Offsets of a tile ``[GROUPS, PADDED, COLUMNS]`` and where it is within the matrix."""
    place = tl.arange(0, PADDED)[None, :, None]
    columns = column + tl.arange(0, COLUMNS)[None, None, :]
    row = (first + tl.arange(0, GROUPS)[:, None, None]) * M + place
    return row * inner + columns, (place < M) & (row < length) & (columns < inner)


@triton.jit
def load_columns(g, column, first, length, inner, M: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr):
    """What ``load_places`` loads as one tile ``[GROUPS * COLUMNS, PADDED]``, for any M."""
    at, there = _column_places(column, first, length, inner, M, GROUPS, COLUMNS, PADDED)
    tile = tl.load(g + at, mask=there, other=0.0)
    return tl.reshape(tl.permute(tile, [0, 2, 1]), [GROUPS * COLUMNS, PADDED])


@triton.jit
def store_columns(out, tile, column, first, length, inner, M: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
    """The inverse of ``load_columns``."""
    at, there = _column_places(column, first, length, inner, M, GROUPS, COLUMNS, tile.shape[1])
    tl.store(out + at, tl.permute(tl.reshape(tile, [GROUPS, COLUMNS, tile.shape[1]]), [0, 2, 1]), mask=there)


@triton.jit
def store_turned(out, tile, first, columns, per_line, M: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of ``load_columns`` as rows of ``per_line`` whole groups; of ``columns`` such rows from ``out`` on, the first COLUMNS."""
    i = tl.arange(0, GROUPS * COLUMNS)[:, None]
    group, column = first + i // COLUMNS, i % COLUMNS
    place = tl.arange(0, tile.shape[1])[None, :]
    there = (place < M) & (group < per_line) & (column < columns)
    tl.store(out + (column * wide(per_line) + group) * M + place, tile, mask=there)
