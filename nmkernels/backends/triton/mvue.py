"""mvue: the unbiased N:M estimate of least variance, along the last dimension or across it.

Memory is seen as ``(outer, length, inner)`` around the grouped dimension. Along the last one (inner = 1) groups lie side by side; across
it a program takes a tile of columns, GROUPS of M rows each, and its groups are counted down the columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._groups import load_groups, store_groups
from ._launch import cdiv, launch, next_power_of_2
from ._mvue import estimate
from ._mvue_small import appended, exact_small, joined, parts
from ._philox import pairs24, uniforms24, uniforms24_of_four

ELEMENTS = 2048
"""Elements of a tile along the last dimension."""

COLUMN_ELEMENTS = 8192
"""Elements of a tile across it: for 2:4 128 rows of 64 columns, so that reads are of 128 bytes and packed rows written in runs of 128."""

SMALL = (2, 4, 8)
"""The M whose groups are worked on within a thread, for N <= 2: a thread holds groups of M rows and, in 16 bits, 8 columns."""


@triton.jit
def row_uniforms(seed, first, TILE: tl.constexpr, APPROX: tl.constexpr):
    """The uniforms of groups first, first + 1, ...; first a multiple of 4."""
    if APPROX:
        return pairs24(seed, first + tl.arange(0, TILE))
    else:
        u = tl.reshape(uniforms24_of_four(seed, first // 4 + tl.arange(0, TILE // 4)), [TILE])
        return u, u


@triton.jit
def column_uniforms(seed, line, first, per_line, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, SHARED: tl.constexpr, APPROX: tl.constexpr):
    """The uniforms of groups first, ... of lines line, ..., ``[GROUPS, COLUMNS]``; group g of line l has index l * per_line + g."""
    start = (line + tl.arange(0, COLUMNS)) * per_line + first
    if APPROX:
        return pairs24(seed, start[None, :] + tl.arange(0, GROUPS)[:, None])
    else:
        if SHARED:
            fours = uniforms24_of_four(seed, (start // 4)[None, :] + tl.arange(0, GROUPS // 4)[:, None])
            u = tl.reshape(tl.permute(fours, [0, 2, 1]), [GROUPS, COLUMNS])
        else:
            u = uniforms24(seed, start[None, :] + tl.arange(0, GROUPS)[:, None])
        return u, u


@triton.jit
def load_places(g, column, first, length, inner, M: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
    """Groups first, ... of columns column, ... of a matrix ``(length, inner)`` as M tensors ``[GROUPS, COLUMNS]``; zeros past its edges."""
    columns = column + tl.arange(0, COLUMNS)
    row = (first + tl.arange(0, GROUPS)[:, None]) * M
    at = g + row * inner + columns[None, :]
    out = ()
    for i in tl.static_range(M):
        out = appended(out, tl.load(at + i * inner, mask=(columns < inner)[None, :] & (row < length - i), other=0.0))
    return out


@triton.jit
def store_places(out, xs, column, first, length, inner):
    """The inverse of ``load_places``."""
    columns = column + tl.arange(0, xs[0].shape[1])
    row = (first + tl.arange(0, xs[0].shape[0])[:, None]) * len(xs)
    at = out + row * inner + columns[None, :]
    for i in tl.static_range(len(xs)):
        tl.store(at + i * inner, xs[i], mask=(columns < inner)[None, :] & (row < length - i))


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
def mvue_rows_kernel(
    g, seed, out, groups,
    N: tl.constexpr, M: tl.constexpr, APPROX: tl.constexpr, SMALL: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """out = mvue(g) of groups that lie side by side."""
    first = tl.program_id(0).to(tl.int64) * TILE
    x = load_groups(g, first, groups, M, TILE, PADDED)
    u0, u1 = row_uniforms(seed, first, TILE, APPROX)
    if SMALL:
        store_groups(out, joined(exact_small(parts(x, M), u0, N)), first, groups, M)
    else:
        store_groups(out, estimate(x, u0, u1, N, M, APPROX), first, groups, M)


@triton.jit
def mvue_columns_kernel(
    g, seed, out, length, inner, per_line, column_blocks, group_blocks,
    N: tl.constexpr, M: tl.constexpr, APPROX: tl.constexpr, SMALL: tl.constexpr, SHARED: tl.constexpr,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """out = mvue(g) along the middle of ``(outer, length, inner)``. Neighbouring programs take neighbouring columns."""
    program = tl.program_id(0)
    column = (program % column_blocks).to(tl.int64) * COLUMNS
    first = ((program // column_blocks) % group_blocks).to(tl.int64) * GROUPS
    outer = (program // column_blocks // group_blocks).to(tl.int64)
    u0, u1 = column_uniforms(seed, outer * inner + column, first, per_line, COLUMNS, GROUPS, SHARED, APPROX)
    g += outer * length * inner
    out += outer * length * inner
    if SMALL:
        xs = load_places(g, column, first, length, inner, M, GROUPS, COLUMNS)
        store_places(out, exact_small(xs, u0, N), column, first, length, inner)
    else:
        x = load_columns(g, column, first, length, inner, M, GROUPS, COLUMNS, PADDED)
        tile = estimate(x, tl.reshape(u0, [GROUPS * COLUMNS]), tl.reshape(u1, [GROUPS * COLUMNS]), N, M, APPROX)
        store_columns(out, tile, column, first, length, inner, M, GROUPS, COLUMNS)


def _column_tile(m: int) -> tuple[int, int]:
    """Groups and columns of a tile across the last dimension."""
    padded = next_power_of_2(m)
    columns = 64 if padded <= 32 else 16
    return max(4, COLUMN_ELEMENTS // (padded * columns)), columns


def mvue(g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str, out: Tensor | None = None) -> Tensor:
    """``nm_mvue``."""
    g, seed, dim = g.resolve_neg().contiguous(), seed.contiguous(), dim % g.dim()
    result = g.new_empty(g.shape) if out is None else out
    memory = result.view(torch.int16 if result.element_size() == 2 else torch.int32)
    outer, length, inner = g.shape[:dim].numel(), g.shape[dim], g.shape[dim + 1 :].numel()
    padded, approx = next_power_of_2(m), method == "approx"
    consts = {"N": n, "M": m, "APPROX": approx, "SMALL": not approx and n <= 2 and m in SMALL}
    if inner == 1 and length % m == 0:
        groups, tile = g.numel() // m, max(4, ELEMENTS // padded)
        launch(mvue_rows_kernel, cdiv(groups, tile), (g, seed, memory, groups), **consts, TILE=tile, PADDED=padded)
        return result
    groups, columns = _column_tile(m)
    per_line = cdiv(length, m)
    blocks = cdiv(inner, columns), cdiv(per_line, groups)
    args = (g, seed, memory, length, inner, per_line, *blocks)
    consts |= {"SHARED": per_line % 4 == 0, "GROUPS": groups, "COLUMNS": columns, "PADDED": padded}
    launch(mvue_columns_kernel, outer * blocks[0] * blocks[1], args, **consts)
    return result
