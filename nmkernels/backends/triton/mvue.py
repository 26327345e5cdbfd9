"""mvue: the unbiased N:M estimate of least variance, along the last dimension or across it.

Memory is seen as ``(outer, length, inner)`` around the grouped dimension. Along the last one (inner = 1) groups lie side by side; across
it a program takes a tile of columns, GROUPS of M rows each, and its groups are counted down the columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...pattern import Pattern
from ._groups import load_groups, store_groups
from ._launch import cdiv, launch, next_power_of_2
from ._mvue import estimate
from ._mvue_small import exact_small, joined, parts, uncarried_all
from ._mvue_tiles import column_uniforms, load_columns, load_places, place_uniforms, row_uniforms, store_columns, store_places, store_turned
from ._pack import filled_up, store_packed
from ._pack_small import compacted_small, lined, store_packed_small, turned
from .compress import as_integers, rows_of

ELEMENTS = 2048
"""Elements of a tile along the last dimension."""

COLUMN_BYTES = 4096
"""Bytes of a tile across it, where shared memory turns a tile of groups."""

SMALL_BYTES = 256
"""Bytes down a tile of small groups of 64 columns: 16-bit numbers are read 128 bytes at once, those of 2:4 written in runs of 128."""

SMALL = (2, 4, 8)
"""The M whose groups are worked on within a thread, for N <= 2: a thread holds groups of M rows and, in 16 bits, 8 columns."""


@triton.jit
def mvue_rows_kernel(
    g, seed, out, groups,
    N: tl.constexpr, M: tl.constexpr, APPROX: tl.constexpr, SMALL: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """out = mvue(g) of groups that lie side by side."""
    first = tl.program_id(0).to(tl.int64) * TILE
    x = load_groups(g, first, groups, M, TILE, PADDED)
    u0, u1 = row_uniforms(seed, first, TILE, True, APPROX)
    if SMALL:
        store_groups(out, joined(uncarried_all(exact_small(parts(x, M), u0, N), x.dtype)), first, groups, M)
    else:
        store_groups(out, estimate(x, u0, u1, N, M, APPROX), first, groups, M)


@triton.jit
def mvue_columns_kernel(
    g, seed, out, length, inner, per_line, column_blocks, group_blocks,
    N: tl.constexpr, M: tl.constexpr, APPROX: tl.constexpr, SMALL: tl.constexpr, PADDED: tl.constexpr,
    SHARED: tl.constexpr, TURNED: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out = mvue(g) along the middle of ``(outer, length, inner)``. Neighbouring programs take neighbouring columns.

    TURNED, which no small group is: out is ``(outer, inner, per_line * M)`` instead.
    """
    program = tl.program_id(0)
    column = (program % column_blocks).to(tl.int64) * COLUMNS
    first = ((program // column_blocks) % group_blocks).to(tl.int64) * GROUPS
    outer = (program // column_blocks // group_blocks).to(tl.int64)
    line = outer * inner + column
    g += outer * length * inner
    if SMALL:
        xs = load_places(g, column, first, length, inner, M, GROUPS, COLUMNS)
        u = place_uniforms(seed, line, first, per_line, GROUPS, COLUMNS, SHARED)
        xs = uncarried_all(exact_small(xs, u, N), g.dtype.element_ty)
        store_places(out + outer * length * inner, xs, column, first, length, inner)
    else:
        x = load_columns(g, column, first, length, inner, M, GROUPS, COLUMNS, PADDED)
        u0, u1 = column_uniforms(seed, line, first, per_line, GROUPS, COLUMNS, APPROX)
        tile = estimate(x, u0, u1, N, M, APPROX)
        if TURNED:
            store_turned(out + line * per_line * M, tile, first, inner - column, per_line, M, GROUPS, COLUMNS)
        else:
            store_columns(out + outer * length * inner, tile, column, first, length, inner, M, GROUPS, COLUMNS)


@triton.jit
def small_rows_kernel(
    g, seed, values, indices, rows, per_row, row_bytes, blocks,
    N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, SHARED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """values, indices = mvue_compress(g) of rows of small groups."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    first = (program % blocks).to(tl.int64) * TILE
    x = load_groups(g + row * per_row * M, first, per_row, M, TILE, M)
    u, _u = row_uniforms(seed, row * per_row + first, TILE, SHARED, False)
    found, codes = compacted_small(exact_small(parts(x, M), u, N), N, BITS)
    vs = lined(uncarried_all(found, x.dtype))
    store_packed_small(values, indices, vs, codes[None, :], row, first, rows, per_row, row_bytes, N * BITS)


@triton.jit
def small_columns_kernel(
    g, seed, values, indices, length, inner, per_line, row_bytes, column_blocks, group_blocks,
    N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, SHARED: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """values, indices = mvue_compress(g) of small groups along the middle of ``(outer, length, inner)``; a column becomes a row."""
    program = tl.program_id(0)
    column = (program % column_blocks).to(tl.int64) * COLUMNS
    first = ((program // column_blocks) % group_blocks).to(tl.int64) * GROUPS
    outer = (program // column_blocks // group_blocks).to(tl.int64)
    row = outer * inner + column
    xs = load_places(g + outer * length * inner, column, first, length, inner, M, GROUPS, COLUMNS)
    u = place_uniforms(seed, row, first, per_line, GROUPS, COLUMNS, SHARED)
    found, codes = compacted_small(exact_small(xs, u, N), N, BITS)
    vs = turned(uncarried_all(found, g.dtype.element_ty))
    rows = outer * inner + inner
    store_packed_small(values, indices, vs, tl.trans(codes), row, first, rows, per_line, row_bytes, N * BITS)


@triton.jit
def pack_kernel(
    dense, values, indices, rows, per_row, row_bytes, blocks,
    N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr, PADDED_N: tl.constexpr,
):  # fmt: skip
    """values, indices = the non-zeros of ``dense``, at most N a group, filled up to N."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    first = (program % blocks).to(tl.int64) * TILE
    bits = load_groups(dense + row * per_row * M, first, per_row, M, TILE, PADDED)
    keep = (bits << 1) != 0
    bits = tl.where(keep, bits, 0).to(bits.dtype)
    store_packed(values, indices, bits, filled_up(keep, N, M), row, first, rows, per_row, row_bytes, N, BITS, 1, TILE, PADDED_N)


class Layout(NamedTuple):
    """A tensor around its grouped dimension, as both ops take it: contiguous, ``(outer, length, inner)``."""

    g: Tensor
    outer: int
    length: int
    inner: int


def _layout(g: Tensor, dim: int, turn: bool) -> Layout:
    dim %= g.dim()
    if turn and g.dim() == 2 and not g.is_contiguous() and g.t().is_contiguous():
        g, dim = g.t(), 1 - dim  # packed rows are the same, whichever way g lies
    g = g.resolve_neg().contiguous()
    return Layout(g, g.shape[:dim].numel(), g.shape[dim], g.shape[dim + 1 :].numel())


def _is_small(n: int, m: int, method: str) -> bool:
    return method == "exact" and n <= 2 and m in SMALL


def _column_tile(g: Tensor, m: int, small: bool) -> tuple[int, int]:
    """Groups and columns of a tile across the last dimension."""
    if small:
        return min(SMALL_BYTES // (m * g.element_size()), 32), 64
    padded = next_power_of_2(m)
    columns = 64 if padded <= 8 else 32 if padded == 16 else 16 if padded <= 128 else 8
    return max(1, COLUMN_BYTES // (padded * columns * g.element_size())), columns


def _estimate(given: Layout, n: int, m: int, seed: Tensor, method: str, out: Tensor, turned: bool) -> None:
    """Start the kernel that writes the dense estimate: like g, or turned: ``(outer, inner, length in whole groups)``."""
    g, outer, length, inner = given
    padded, small = next_power_of_2(m), _is_small(n, m, method)
    consts = {"N": n, "M": m, "APPROX": method == "approx", "SMALL": small, "PADDED": padded}
    if inner == 1 and length % m == 0:
        count, tile = outer * length // m, max(4, ELEMENTS // padded)
        launch(mvue_rows_kernel, cdiv(count, tile), (g, seed, as_integers(out), count), **consts, TILE=tile)
        return
    per_line, (groups, columns) = cdiv(length, m), _column_tile(g, m, small)
    blocks = cdiv(inner, columns), cdiv(per_line, groups)
    args = (g, seed, as_integers(out), length, inner, per_line, *blocks)
    consts |= {"SHARED": per_line % 4 == 0, "TURNED": turned, "GROUPS": groups, "COLUMNS": columns}
    launch(mvue_columns_kernel, outer * blocks[0] * blocks[1], args, 8 if small else 4, **consts)


def mvue(g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str, out: Tensor | None = None) -> Tensor:
    """``nm_mvue``."""
    given = _layout(g, dim, turn=False)
    result = g.new_empty(g.shape) if out is None else out
    _estimate(given, n, m, seed.contiguous(), method, result, turned=False)
    return result


def mvue_compress(
    g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """``nm_mvue_compress``: small groups in one pass; others as a dense estimate, turned, that a second kernel packs."""
    p, lead, given = Pattern(n, m), g.movedim(dim, -1).shape[:-1], _layout(g, dim, turn=True)
    g, outer, length, inner = given
    per_row, row_bytes, seed = p.groups(length), p.index_bytes(length), seed.contiguous()
    if out is None:
        out = g.new_empty(*lead, per_row * n), g.new_empty(*lead, row_bytes, dtype=torch.uint8)
    packed, consts = (as_integers(out[0]), out[1]), {"N": n, "M": m, "BITS": p.index_bits}
    if not _is_small(n, m, method):
        dense = g.new_empty(outer * inner, per_row * m)
        _estimate(given, n, m, seed, method, dense, turned=True)
        walk = rows_of(dense.numel(), per_row * m, n, m)
        consts |= {"TILE": walk.tile, "PADDED": next_power_of_2(m), "PADDED_N": next_power_of_2(n)}
        launch(pack_kernel, walk.rows * walk.blocks, (as_integers(dense), *packed, *walk[:3], walk.blocks), **consts)
    elif inner == 1 and length % m == 0:
        walk, tile = rows_of(g.numel(), length, n, m), ELEMENTS // m
        blocks = cdiv(walk.per_row, tile)
        consts |= {"SHARED": walk.rows <= 1 or per_row % 4 == 0, "TILE": tile}
        launch(small_rows_kernel, walk.rows * blocks, (g, seed, *packed, *walk[:3], blocks), **consts)
    else:
        groups, columns = _column_tile(g, m, True)
        turns = cdiv(inner, columns), cdiv(per_row, groups)
        args = (g, seed, *packed, length, inner, per_row, row_bytes, *turns)
        consts |= {"SHARED": per_row % 4 == 0, "GROUPS": groups, "COLUMNS": columns}
        launch(small_columns_kernel, outer * turns[0] * turns[1], args, 8, **consts)
    return out
