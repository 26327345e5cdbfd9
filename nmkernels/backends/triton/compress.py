"""compress, decompress and pack: dense to the canonical N:M form and back, each byte read and written once.

The groups of a tile are a multiple of 8 / bits, so that no byte of indices is shared by two tiles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...pattern import Pattern
from .. import shared
from .groups import ELEMENTS, bits_of, kept, load_groups, mask, soft_threshold
from .launch import cdiv, launch, next_power_of_2
from .transposable import transposable_mask

ODD_ELEMENTS = 4096
"""Largest intermediate tile when indices are sorted into bytes by comparing with every target."""


def rows_of(dense: int, cols: int, n: int, m: int) -> tuple[int, int, int, int, int]:
    """Rows, groups and index bytes per row, groups per tile, and tiles per row of a packed tensor of ``dense`` elements.

    A single long row if rows of ``cols`` end at byte and group boundaries.
    """
    p = Pattern(n, m)
    rows, per_row, row_bytes = (dense // cols if cols else 0), p.groups(cols), p.index_bytes(cols)
    if cols % m == 0 and per_row * n * p.index_bits % 8 == 0:
        rows, per_row, row_bytes = 1, rows * per_row, rows * row_bytes
    padded = next_power_of_2(m)
    tile = max(1, ELEMENTS // padded)
    if m <= 16 and n not in (1, 2, 4):  # indices do not fill bytes group by group
        tile = min(tile, ODD_ELEMENTS // (padded * next_power_of_2(n)))
    tile = max(tile, 8)
    return rows, per_row, row_bytes, tile, cdiv(per_row, tile)


@triton.jit
def compacted(bits, stored, N: tl.constexpr, PADDED_N: tl.constexpr):
    """Values and indices of the N stored elements of each group, in order of index: two tiles ``[groups, PADDED_N]`` of integers."""
    index = tl.arange(0, bits.shape[1])[None, :]
    if PADDED_N == N:
        slot = tl.arange(0, N)[None, :]
        values = tl.zeros([bits.shape[0], N], bits.dtype)
        indices = tl.zeros([bits.shape[0], N], tl.int32)
        at = tl.full([bits.shape[0], 1], -1, tl.int32)
        for j in tl.static_range(N):
            at = tl.min(tl.where(stored & (index > at), index, 256), 1, keep_dims=True)
            # at most one element is non-zero, so this sum is a copy
            value = tl.sum(tl.where(index == at, bits, 0), 1, keep_dims=True).to(bits.dtype)
            values = tl.where(slot == j, value, values)
            indices = tl.where(slot == j, at, indices)
    else:
        rank = tl.cumsum(stored.to(tl.int32), 1) - 1
        chosen = stored[:, :, None] & (rank[:, :, None] == tl.arange(0, PADDED_N)[None, None, :])
        values = tl.sum(tl.where(chosen, bits[:, :, None], 0), 1).to(bits.dtype)
        indices = tl.sum(tl.where(chosen, index[:, :, None], 0), 1)
    return values, indices


@triton.jit
def bytes_of(indices, BITS: tl.constexpr):
    """Pack consecutive indices of BITS bits into bytes, lowest bits first: ``[8 / BITS * bytes]`` to ``[bytes]``."""
    # by splitting: Triton 3.6 sums the wrong lanes when it reduces a reshaped tile held by several lanes
    if BITS == 8:
        return indices.to(tl.uint8)
    else:
        even, odd = tl.split(tl.reshape(indices, [indices.shape[0] // 2, 2]))
        pairs = even | (odd << BITS)
        if BITS == 2:
            even, odd = tl.split(tl.reshape(pairs, [pairs.shape[0] // 2, 2]))
            pairs = even | (odd << 4)
        return pairs.to(tl.uint8)


@triton.jit
def compress_kernel(
    w, mask, values, indices, overfull, per_row, row_bytes, blocks,
    N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, GIVEN: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr,
    PADDED_N: tl.constexpr,
):  # fmt: skip
    """values, indices = compress(w), by magnitude or, if GIVEN, by a mask; sets ``overfull`` if the mask keeps more than N in a group."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    first = (program % blocks).to(tl.int64) * TILE
    x = load_groups(w + row * per_row * M, first, per_row, M, TILE, PADDED)
    bits = bits_of(x)
    if GIVEN:
        keep = load_groups(mask + row * per_row * M, first, per_row, M, TILE, PADDED) != 0
        tl.store(overfull, 1, mask=tl.max(tl.sum(keep.to(tl.int32), 1), 0) > N)
        bits = tl.where(keep, bits, 0)
        # the lowest unkept elements are added in groups that keep fewer than N
        spare = (keep == 0) & (tl.arange(0, keep.shape[1])[None, :] < M)
        missing = N - tl.sum(keep.to(tl.int32), 1, keep_dims=True)
        stored = keep | (spare & (tl.cumsum(spare.to(tl.int32), 1) <= missing))
    else:
        stored = kept(x, N, M)
    values += row * per_row * N + first * N
    indices += row * row_bytes + (first * N * BITS) // 8
    left = per_row - first
    group = tl.arange(0, TILE)[:, None]
    if BITS == 8 and (N == 3 or N > 4):
        # one byte per index: each is written to its place, without compaction
        exists = stored & (group < left)
        offset = group * N + tl.cumsum(stored.to(tl.int32), 1) - 1
        tl.store(values + offset, bits, mask=exists)
        tl.store(indices + offset, tl.broadcast_to(tl.arange(0, bits.shape[1])[None, :], bits.shape).to(tl.uint8), mask=exists)
    else:
        v, positions = compacted(bits, stored, N, PADDED_N)
        positions = tl.where(group < left, positions, 0)
        if PADDED_N == N:
            i = tl.arange(0, TILE * N)
            tl.store(values + i, tl.reshape(v, [TILE * N]), mask=i < left * N)
            packed = bytes_of(tl.reshape(positions, [TILE * N]), BITS)
            i = tl.arange(0, TILE * N * BITS // 8)
        else:
            i = tl.arange(0, PADDED_N)[None, :]
            tl.store(values + group * N + i, v, mask=(group < left) & (i < N))
            # N is not a power of two: 8 / BITS groups fill N bytes, [units, PADDED_N]
            PER: tl.constexpr = 8 // BITS
            slot = tl.arange(0, PER * PADDED_N)
            index = slot % PADDED_N
            bit = ((slot // PADDED_N) * N + index) * BITS
            byte = tl.where(index < N, bit >> 3, PADDED_N)
            shifted = tl.reshape(positions, [TILE // PER, PER * PADDED_N]) << (bit & 7)[None, :]
            matches = byte[None, :, None] == tl.arange(0, PADDED_N)[None, None, :]
            packed = tl.sum(tl.where(matches, shifted[:, :, None], 0), 1).to(tl.uint8)
            unit = tl.arange(0, TILE * BITS // 8)[:, None]
            i = tl.where(i < N, unit * N + i, row_bytes)
        tl.store(indices + i, packed, mask=i < row_bytes - (first * N * BITS) // 8)


def compress(w: Tensor, n: int, m: int, mask: Tensor | None = None, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """``nm_compress``. A given mask is checked afterwards, which synchronises; not checked during graph capture."""
    w, cols = shared.contiguous(w), w.shape[-1]
    values, indices = shared.packed(w, w.shape[:-1], cols, n, m) if out is None else out
    rows, per_row, row_bytes, tile, blocks = rows_of(w.numel(), cols, n, m)
    mask_bytes = None if mask is None else mask.contiguous().view(torch.int8)
    overfull = shared.flag_for(mask_bytes)
    args = (w, mask_bytes, as_integers(values), indices, overfull, per_row, row_bytes, blocks)
    consts = {"N": n, "M": m, "BITS": Pattern(n, m).index_bits, "GIVEN": mask_bytes is not None, "TILE": tile}
    launch(compress_kernel, rows * blocks, args, **consts, PADDED=next_power_of_2(m), PADDED_N=next_power_of_2(n))
    shared.check_flag("compress", overfull, n, m)
    return values, indices


def as_integers(x: Tensor) -> Tensor:
    """View as integers of the same size, so that kernels copy exact bits."""
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


@triton.jit
def decompress_kernel(
    values, indices, out, per_row, row_bytes, cols, blocks,
    N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """out = the dense rows; an out-of-range index writes nothing."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    first = (program % blocks).to(tl.int64) * TILE
    index = tl.arange(0, PADDED)[None, :]
    values += row * per_row * N + first * N
    indices += row * row_bytes + (first * N * BITS) // 8
    left = per_row - first
    if N <= 4 and N != 3:
        line = tl.arange(0, TILE * N)
        v = tl.load(values + line, mask=line < left * N, other=0)
        line = tl.arange(0, TILE * N * BITS // 8)
        packed = tl.load(indices + line, mask=line < row_bytes - (first * N * BITS) // 8, other=0)
        shift = (tl.arange(0, 8 // BITS) * BITS)[None, :]
        at = tl.reshape((packed.to(tl.int32)[:, None] >> shift) & ((1 << BITS) - 1), [TILE * N])
        dense = _spread(v, at, index, N, TILE)
    else:
        group = tl.arange(0, TILE)
        dense = tl.zeros([TILE, PADDED], values.dtype.element_ty)
        for j in range(N):
            k = group * N + j
            v = tl.load(values + k, mask=group < left, other=0)
            byte = tl.load(indices + ((k * BITS) >> 3), mask=group < left, other=0).to(tl.int32)
            at = (byte >> ((k * BITS) & 7)) & ((1 << BITS) - 1)
            dense = tl.where(index == at[:, None], v[:, None], dense)
    if PADDED == M:
        line = tl.arange(0, TILE * M)
        tl.store(out + row * cols + first * M + line, tl.reshape(dense, [TILE * M]), mask=line < cols - first * M)
    else:
        column = first * M + tl.arange(0, TILE)[:, None] * M + index
        tl.store(out + row * cols + column, dense, mask=(index < M) & (column < cols))


@triton.jit
def _spread(v, at, index, N: tl.constexpr, TILE: tl.constexpr):
    """Scatter values ``[TILE * N]`` by their indices into dense groups ``[TILE, M]``; N is 1, 2 or 4."""
    if N == 1:
        return tl.where(index == at[:, None], v[:, None], 0).to(v.dtype)
    else:
        even, odd = tl.split(tl.reshape(v, [TILE, N // 2, 2]))
        even_at, odd_at = tl.split(tl.reshape(at, [TILE, N // 2, 2]))
        low = _spread(tl.reshape(even, [TILE * N // 2]), tl.reshape(even_at, [TILE * N // 2]), index, N // 2, TILE)
        return low | _spread(tl.reshape(odd, [TILE * N // 2]), tl.reshape(odd_at, [TILE * N // 2]), index, N // 2, TILE)


def decompress(values: Tensor, indices: Tensor, n: int, m: int, cols: int, out: Tensor | None = None) -> Tensor:
    """``nm_decompress``. Indices are not checked, which would synchronise; an out-of-range one writes nothing."""
    values, indices = shared.contiguous(values), indices.contiguous()
    dense = values.new_empty(*values.shape[:-1], cols) if out is None else out
    rows, per_row, row_bytes, tile, blocks = rows_of(dense.numel(), cols, n, m)
    row = cols if rows > 1 or cols % m else dense.numel()
    args = (as_integers(values), indices, as_integers(dense), per_row, row_bytes, row, blocks)
    consts = {"N": n, "M": m, "BITS": Pattern(n, m).index_bits, "TILE": tile, "PADDED": next_power_of_2(m)}
    launch(decompress_kernel, rows * blocks, args, **consts)
    return dense


def pack(*args: Any, out: None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``nm_pack``, composed of the other kernels. The mask, also one that it makes itself, is checked, which synchronises."""
    return shared.pack(PARTS, *args)


PARTS = shared.Parts(mask, soft_threshold, transposable_mask, compress, decompress)
