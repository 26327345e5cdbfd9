"""Load groups as ``[groups, M]`` tiles, rank their magnitudes, round; mask, prune, soft_threshold and its scale.

A tile has one group per row; M is padded to a power of two, and padding never ranks above an element. One program processes one tile; each
element is read and written once.

The scale needs two float64 sums over a tensor, in an order that depends only on its size: the kernel writes two partial sums per 8192
elements, which torch adds. The reference adds 4096 elements at a time from left to right, so the results agree to float64 rounding.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..shared import contiguous
from .launch import INTERPRETED as _INTERPRETED
from .launch import cdiv, launch, next_power_of_2

INTERPRETED = tl.constexpr(_INTERPRETED)

ELEMENTS = 2048
"""Elements per tile: with 4 warps two or four 16-byte reads per thread, enough to hide latency."""

PADDED_ELEMENTS = 1024
"""The same if M is padded: each element then has its own address, and 16 of them do not fit in registers (3:5, sm_90)."""

TILES = 4
"""Tiles per program: few enough that a weight of 4096 x 4096 still fills a GPU."""


@triton.jit
def bits_of(x):
    if x.dtype.primitive_bitwidth == 16:
        return x.to(tl.int16, bitcast=True)
    else:
        return x.to(tl.int32, bitcast=True)


@triton.jit
def widen(x):
    """Convert ``x`` to float32 exactly; bfloat16 by its bits, because the interpreter's conversion is not exact."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Round float32 ``x`` to ``dtype``, to nearest even; Triton 3.6's interpreter would truncate to bfloat16."""
    if dtype == tl.bfloat16 and INTERPRETED:
        b = x.to(tl.uint32, bitcast=True)
        rounded = (b + 0x7FFF + ((b >> 16) & 1)) >> 16
        quiet = (b >> 16) | 0x40
        nan = (b & 0x7FFFFFFF) > 0x7F800000
        return tl.where(nan, quiet, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def magnitude_keys(x):
    """Integers in the order of magnitudes: -0.0 and 0.0 tie, every NaN is infinity's key plus one (int32)."""
    if x.dtype == tl.float32:
        return tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800001)
    elif x.dtype == tl.bfloat16:
        return tl.minimum(x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF, 0x7F81)
    else:
        return tl.minimum(x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF, 0x7C01)


@triton.jit
def ranked_keys(x, M: tl.constexpr):
    """Distinct keys of a tile ``[groups, padded M]``: larger magnitude first, then lower index; -1 in the padding.

    key · 256 + (255 - index): 23 bits in int32 for 16-bit numbers, 39 in int64 for float32.
    """
    index = tl.arange(0, x.shape[1])[None, :]
    key = magnitude_keys(x)
    if x.dtype == tl.float32:
        key = key.to(tl.int64)
    ranked = (key << 8) | (255 - index)
    if x.shape[1] == M:
        return ranked
    else:
        return tl.where(index < M, ranked, -1)


@triton.jit
def nth_largest(keys, N: tl.constexpr):
    """The N-th largest of each row of distinct keys, ``[groups, 1]``; N is 1 for the largest."""
    if keys.shape[1] == 4 and N == 2:
        even, odd = tl.split(tl.reshape(keys, [keys.shape[0], 2, 2]))
        high, low = tl.maximum(even, odd), tl.minimum(even, odd)
        high0, high1 = tl.split(high)
        low0, low1 = tl.split(low)
        return tl.maximum(tl.minimum(high0, high1), tl.maximum(low0, low1))[:, None]
    elif N <= 4:
        key = tl.max(keys, 1, keep_dims=True)
        for _ in tl.static_range(N - 1):
            key = tl.max(tl.where(keys < key, keys, -1), 1, keep_dims=True)
        return key
    else:
        # bit by bit from the top: at least N keys are >= the prefix so far
        key = tl.zeros([keys.shape[0], 1], keys.dtype)
        top: tl.constexpr = 22 if keys.dtype == tl.int32 else 38
        bit = tl.full([keys.shape[0], 1], 1 << top, keys.dtype)
        for _ in range(top + 1):
            reach = tl.sum((keys >= (key | bit)).to(tl.int32), 1, keep_dims=True)
            key = tl.where(reach >= N, key | bit, key)
            bit = bit >> 1
        return key


@triton.jit
def two_of_four(keys):
    """The 2:4 mask of magnitude keys ``[groups, 4]``: an element is kept if at least two of the other three rank below it."""
    even, odd = tl.split(tl.reshape(keys, [keys.shape[0], 2, 2]))
    k0, k2 = tl.split(even)
    k1, k3 = tl.split(odd)
    a, b, c, d, e, f = k0 >= k1, k0 >= k2, k0 >= k3, k1 >= k2, k1 >= k3, k2 >= k3
    m0, m1 = (a & b) | (a & c) | (b & c), (~a & d) | (~a & e) | (d & e)
    m2, m3 = (~b & ~d) | (~b & f) | (~d & f), (~c & ~e) | (~c & ~f) | (~e & ~f)
    return tl.reshape(tl.join(tl.join(m0, m2), tl.join(m1, m3)), [keys.shape[0], 4])


@triton.jit
def kept(x, N: tl.constexpr, M: tl.constexpr):
    """The N:M mask of a tile ``[groups, padded M]``; False in the padding."""
    if N == 2 and M == 4 and x.dtype == tl.float32:
        return two_of_four(magnitude_keys(x))
    keys = ranked_keys(x, M)
    if N == M:
        return keys >= 0
    else:
        return keys >= nth_largest(keys, N)


@triton.jit
def load_groups(x, first, count, M: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr):
    """Load groups first, first + 1, ... of ``count`` contiguous ones as a tile ``[TILE, PADDED]``, with zeros past the end.

    ``first`` is int64. If M is a power of two the tile is loaded as a line and reshaped, so that a thread reads 16 bytes at once.
    """
    if PADDED == M:
        line = tl.arange(0, TILE * M)
        flat = tl.load(x + first * M + line, mask=line < (count - first) * M, other=0.0)
        return tl.reshape(flat, [TILE, M])
    else:
        group = tl.arange(0, TILE)[:, None]
        index = tl.arange(0, PADDED)[None, :]
        return tl.load(x + first * M + group * M + index, mask=(group < count - first) & (index < M), other=0.0)


@triton.jit
def store_groups(out, tile, first, count, M: tl.constexpr):
    if tile.shape[1] == M:
        line = tl.arange(0, tile.shape[0] * M)
        tl.store(out + first * M + line, tl.reshape(tile, [tile.shape[0] * M]), mask=line < (count - first) * M)
    else:
        group = tl.arange(0, tile.shape[0])[:, None]
        index = tl.arange(0, tile.shape[1])[None, :]
        tl.store(out + first * M + group * M + index, tile, mask=(group < count - first) & (index < M))


@triton.jit
def shrink(x, N: tl.constexpr, M: tl.constexpr):
    """Soft threshold of a tile, sign(w)·max(|w| − t, 0), rounded to its dtype; t is the (N+1)-th largest magnitude, 0 for N = M."""
    wide = widen(x)
    d = tl.abs(wide)
    if N < M:
        key = (nth_largest(ranked_keys(x, M), N + 1) >> 8).to(tl.int32)
        if x.dtype == tl.float32:
            t = key.to(tl.float32, bitcast=True)
        elif x.dtype == tl.bfloat16:
            t = (key << 16).to(tl.float32, bitcast=True)
        else:
            t = key.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        d = d - t
    signed = (d.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | (wide.to(tl.int32, bitcast=True) & -0x80000000)
    return narrow(tl.where(d <= 0.0, 0.0, signed.to(tl.float32, bitcast=True)), x.dtype)


@triton.jit
def groups_kernel(
    w, out, groups, OP: tl.constexpr, N: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """out = mask(w), one byte per element; prune(w), +0.0 outside the mask; or soft_threshold(w)."""
    first = tl.program_id(0).to(tl.int64) * TILE
    x = load_groups(w, first, groups, M, TILE, PADDED)
    if OP == "mask":
        x = kept(x, N, M).to(tl.int8)
    elif OP == "prune":
        x = tl.where(kept(x, N, M), x, 0.0)
    else:
        x = shrink(x, N, M)
    store_groups(out, x, first, groups, M)


def _tiles(w: Tensor, m: int) -> tuple[int, int, int]:
    """Number of groups, M padded to a power of two, and groups per tile."""
    padded = next_power_of_2(m)
    return w.numel() // m, padded, max(1, (ELEMENTS if padded == m else PADDED_ELEMENTS) // padded)


def _elementwise(op: str, w: Tensor, n: int, m: int, out: Tensor | None = None) -> Tensor:
    """Apply an op that maps groups to groups of the same size."""
    w, dtype = contiguous(w), torch.bool if op == "mask" else w.dtype
    result = torch.empty_like(w, dtype=dtype) if out is None else out
    groups, padded, tile = _tiles(w, m)
    memory = result.view(torch.int8) if dtype == torch.bool else result
    launch(groups_kernel, cdiv(groups, tile), (w, memory, groups), OP=op, N=n, M=m, TILE=tile, PADDED=padded)
    return result


mask, prune, soft_threshold = (partial(_elementwise, op) for op in ("mask", "prune", "soft_threshold"))


@triton.jit
def scale_sums_kernel(
    w, sums, groups, programs, N: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr, TILES: tl.constexpr
):
    """sums[0] = <w, S> and sums[1] = ||S||² of this program's groups, S = soft_threshold(w)."""
    program = tl.program_id(0)
    first = program.to(tl.int64) * (TILE * TILES)
    dot = tl.zeros([TILE], tl.float64)
    square = tl.zeros([TILE], tl.float64)
    for _ in range(TILES):
        x = load_groups(w, first, groups, M, TILE, PADDED)
        s = widen(shrink(x, N, M)).to(tl.float64)
        dot += tl.sum(widen(x).to(tl.float64) * s, 1)
        square += tl.sum(s * s, 1)
        first += TILE
    tl.store(sums + program, tl.sum(dot, 0))
    tl.store(sums + programs + program, tl.sum(square, 0))


def soft_threshold_scale(w: Tensor, n: int, m: int, out: Tensor | None = None) -> Tensor:
    w = contiguous(w)
    groups, padded, tile = _tiles(w, m)
    programs = cdiv(groups, tile * TILES)
    sums = w.new_empty(2, programs, dtype=torch.float64)
    launch(scale_sums_kernel, programs, (w, sums, groups, programs), N=n, M=m, TILE=tile, PADDED=padded, TILES=TILES)
    dot, square = sums.sum(1)
    scale = torch.where(square == 0, 0.0, dot / square).float()
    return scale if out is None else out.copy_(scale)
