"""compress and decompress: dense to the canonical N:M form and back, each byte read once and written once."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...pattern import Pattern, ShapeError
from ._groups import bits_of, kept, load_groups
from ._launch import cdiv, flagged, launch, next_power_of_2
from ._pack import filled_up, places_of, store_packed

ELEMENTS = 2048
"""Dense elements of a tile: with 4 warps two or four 16-byte reads a thread."""

ODD_ELEMENTS = 4096
"""Elements of the largest intermediate tile where places are sorted into bytes or values by comparing with every target."""


class Rows(NamedTuple):
    """How a packed matrix is walked: rows of so many groups, and the tile of one program."""

    rows: int
    per_row: int
    row_bytes: int
    tile: int
    blocks: int


def rows_of(dense: int, cols: int, n: int, m: int) -> Rows:
    """The walk over a packed tensor of ``dense`` elements in rows of ``cols``; one long row where no row ends inside a byte or a group."""
    p = Pattern(n, m)
    rows, per_row, row_bytes = (dense // cols if cols else 0), p.groups(cols), p.index_bytes(cols)
    if cols % m == 0 and per_row * n * p.index_bits % 8 == 0:
        rows, per_row, row_bytes = 1, rows * per_row, rows * row_bytes
    tile = tile_groups(n, m)
    return Rows(rows, per_row, row_bytes, tile, cdiv(per_row, tile))


def tile_groups(n: int, m: int) -> int:
    """Groups of a tile: ``ELEMENTS`` dense ones, fewer where compaction compares every element with every target."""
    padded, padded_n = next_power_of_2(m), next_power_of_2(n)
    tile = max(1, ELEMENTS // padded)
    if m <= 16 and n not in (1, 2, 4):
        tile = min(tile, ODD_ELEMENTS // (padded * padded_n))
    return max(tile, 8)


@triton.jit
def compress_kernel(
    w, mask, values, indices, overfull, rows, per_row, row_bytes, blocks,
    N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, GIVEN: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr,
    PADDED_N: tl.constexpr,
):  # fmt: skip
    """values, indices = compress(w), by magnitude or, GIVEN, by a mask, which sets ``overfull`` if it keeps more than N of a group."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    first = (program % blocks).to(tl.int64) * TILE
    x = load_groups(w + row * per_row * M, first, per_row, M, TILE, PADDED)
    bits = bits_of(x)
    if GIVEN:
        keep = load_groups(mask + row * per_row * M, first, per_row, M, TILE, PADDED) != 0
        tl.store(overfull, 1, mask=tl.max(tl.sum(keep.to(tl.int32), 1), 0) > N)
        bits = tl.where(keep, bits, 0)
        stored = filled_up(keep, N, M)
    else:
        stored = kept(x, N, M)
    store_packed(values, indices, bits, stored, row, first, rows, per_row, row_bytes, N, BITS, 1, TILE, PADDED_N)


def compress(w: Tensor, n: int, m: int, mask: Tensor | None = None, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """``nm_compress``. A given mask is checked after the fact, for which the host waits; inside a graph's capture it is not checked."""
    w, cols = w.resolve_neg().contiguous(), w.shape[-1]
    p = Pattern(n, m)
    if out is None:
        out = w.new_empty(*w.shape[:-1], p.kept(cols)), w.new_empty(*w.shape[:-1], p.index_bytes(cols), dtype=torch.uint8)
    values, indices = out
    walk = rows_of(w.numel(), cols, n, m)
    given = None if mask is None else mask.contiguous().view(torch.int8)
    overfull = None if given is None else torch.zeros(1, dtype=torch.int32, device=w.device)
    args = (w, given, as_integers(values), indices, overfull, *walk[:3], walk.blocks)
    consts = {"N": n, "M": m, "BITS": p.index_bits, "GIVEN": given is not None, "TILE": walk.tile}
    launch(compress_kernel, walk.rows * walk.blocks, args, **consts, PADDED=next_power_of_2(m), PADDED_N=next_power_of_2(n))
    if overfull is not None and flagged(overfull):
        raise ShapeError(f"compress: the mask keeps more than {n} elements in a group, but {p} stores {n}; prune it first.")
    return values, indices


def as_integers(x: Tensor) -> Tensor:
    """The same memory as integers of the same size: kernels move bits, which no rounding touches."""
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


@triton.jit
def decompress_kernel(
    values, indices, out, per_row, row_bytes, cols, blocks,
    N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """out = the dense rows; an index outside its group writes nothing."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    first = (program % blocks).to(tl.int64) * TILE
    place = tl.arange(0, PADDED)[None, :]
    values += row * per_row * N + first * N
    indices += row * row_bytes + (first * N * BITS) // 8
    left = per_row - first
    if N <= 4 and N != 3:
        line = tl.arange(0, TILE * N)
        v = tl.load(values + line, mask=line < left * N, other=0)
        line = tl.arange(0, TILE * N * BITS // 8)
        packed = tl.load(indices + line, mask=line < row_bytes - (first * N * BITS) // 8, other=0)
        dense = _spread(v, places_of(packed, BITS), place, N, TILE)
    else:
        group = tl.arange(0, TILE)
        dense = tl.zeros([TILE, PADDED], values.dtype.element_ty)
        for j in range(N):
            k = group * N + j
            v = tl.load(values + k, mask=group < left, other=0)
            byte = tl.load(indices + ((k * BITS) >> 3), mask=group < left, other=0).to(tl.int32)
            at = (byte >> ((k * BITS) & 7)) & ((1 << BITS) - 1)
            dense = tl.where(place == at[:, None], v[:, None], dense)
    if PADDED == M:
        line = tl.arange(0, TILE * M)
        tl.store(out + row * cols + first * M + line, tl.reshape(dense, [TILE * M]), mask=line < cols - first * M)
    else:
        column = first * M + tl.arange(0, TILE)[:, None] * M + place
        tl.store(out + row * cols + column, dense, mask=(place < M) & (column < cols))


@triton.jit
def _spread(v, at, place, N: tl.constexpr, TILE: tl.constexpr):
    """Values ``[TILE * N]`` and their places as dense groups ``[TILE, M]``; N is 1, 2 or 4."""
    if N == 1:
        return tl.where(place == at[:, None], v[:, None], 0).to(v.dtype)
    elif N == 2:
        v0, v1 = tl.split(tl.reshape(v, [TILE, 2]))
        a0, a1 = tl.split(tl.reshape(at, [TILE, 2]))
        rest = tl.where(place == a1[:, None], v1[:, None], 0).to(v.dtype)
        return tl.where(place == a0[:, None], v0[:, None], rest)
    else:
        even, odd = tl.split(tl.reshape(v, [TILE, 2, 2]))
        even_at, odd_at = tl.split(tl.reshape(at, [TILE, 2, 2]))
        low = _spread(tl.reshape(even, [TILE * 2]), tl.reshape(even_at, [TILE * 2]), place, 2, TILE)
        return low | _spread(tl.reshape(odd, [TILE * 2]), tl.reshape(odd_at, [TILE * 2]), place, 2, TILE)


def decompress(values: Tensor, indices: Tensor, n: int, m: int, cols: int, out: Tensor | None = None) -> Tensor:
    """``nm_decompress``. Indices are not checked, which would make the host wait: one outside its group writes nothing."""
    values, indices = values.resolve_neg().contiguous(), indices.contiguous()
    dense = values.new_empty(*values.shape[:-1], cols) if out is None else out
    walk = rows_of(dense.numel(), cols, n, m)
    row = cols if walk.rows > 1 or cols % m else dense.numel()
    args = (as_integers(values), indices, as_integers(dense), *walk[1:3], row, walk.blocks)
    consts = {"N": n, "M": m, "BITS": Pattern(n, m).index_bits, "TILE": walk.tile, "PADDED": next_power_of_2(m)}
    launch(decompress_kernel, walk.rows * walk.blocks, args, **consts)
    return dense
