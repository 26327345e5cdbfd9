"""mvue: the unbiased N:M estimate of least variance, along the last dimension or across it.

Memory is seen as ``(outer, length, inner)`` around the grouped dimension. Along the last one (inner = 1) groups lie side by side; across
it a program takes a tile of columns, GROUPS of M rows each, and its groups are counted down the columns. The arithmetic and its order are
those of ``reference/mvue.py`` and ``csrc/core/mvue.h``, where the method is explained; random words are Philox4x32-10 (Salmon et al., SC
2011). The seed tensor, int64 (seed, offset), is read where it lies, so that a captured graph replays with whatever it then holds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...pattern import Pattern
from ..tensors import Around, around
from .compress import as_integers, compress
from .groups import bits_of, kept, load_groups, narrow, store_groups, widen
from .launch import cdiv, launch, next_power_of_2

ELEMENTS = 2048
"""Elements of a tile along the last dimension."""

COLUMN_BYTES = 4096
"""Bytes of a tile across it, where shared memory turns a tile of groups."""

ONE = tl.constexpr(1 << 24)
"""1 as a 24-bit fixed-point probability."""

TWO_24 = tl.constexpr(float(1 << 24))

NARROW_SUMS = tl.constexpr(120)
"""Up to this N, running sums of N·2^24 and one more fit in int32."""


@triton.jit
def _round(c0, c1, c2, c3, k0, k1):
    """(c0, c1, c2, c3) -> (hi(B c2) ^ c1 ^ k0, lo(B c2), hi(A c0) ^ c3 ^ k1, lo(A c0))."""
    a = c0.to(tl.uint64) * 0xD2511F53
    b = c2.to(tl.uint64) * 0xCD9E8D57
    return (b >> 32).to(tl.uint32) ^ c1 ^ k0, b.to(tl.uint32), (a >> 32).to(tl.uint32) ^ c3 ^ k1, a.to(tl.uint32)


@triton.jit
def philox_block(seed, counter):
    """The four words of each int64 ``counter``: key = (seed lo, hi), counter words = (counter lo, hi, offset lo, hi). uint32."""
    key = tl.load(seed)
    offset = tl.load(seed + 1)
    c0, c1 = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    c2, c3 = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    # the key words grow by a constant a round; in 64 bits, which the cast cuts, so that nothing overflows
    high = key >> 32
    for r in tl.static_range(10):
        k0, k1 = (key + r * 0x9E3779B9).to(tl.uint32), (high + r * 0xBB67AE85).to(tl.uint32)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    return c0, c1, c2, c3


@triton.jit
def uniforms24(seed, j):
    """One 24-bit number for each group ``j`` (int64): word j & 3 of counter j >> 2, int32."""
    w0, w1, w2, w3 = philox_block(seed, j >> 2)
    word = (j & 3).to(tl.int32)
    low = tl.where(word == 0, w0, w1)
    high = tl.where(word == 2, w2, w3)
    return (tl.where(word < 2, low, high) >> 8).to(tl.int32)


@triton.jit
def uniforms24_of_four(seed, block):
    """The numbers of groups 4 block to 4 block + 3, four for each of a vector of blocks: a quarter of the work."""
    w0, w1, w2, w3 = philox_block(seed, block)
    # joined as (w0, w2), (w1, w3), so that the new dimensions count 0, 1, 2, 3
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return (tl.reshape(words, [4 * block.shape[0]]) >> 8).to(tl.int32)


@triton.jit
def pairs24(seed, j):
    """Two 24-bit numbers for each group ``j`` (the approximate method): words 0 and 1 of counter j."""
    w0, w1, _w2, _w3 = philox_block(seed, j)
    return (w0 >> 8).to(tl.int32), (w1 >> 8).to(tl.int32)


@triton.jit
def tree(x):
    """Sum of each row as a balanced binary tree over the index: ((x0 + x1) + (x2 + x3)) + ..., ``[groups, 1]``."""
    if x.shape[1] == 1:
        return x
    else:
        # of two numbers there is one sum, whichever way a reduction goes
        return tree(tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), 2))


@triton.jit
def _any(x):
    return tl.max(tl.reshape(x.to(tl.int32), [x.numel]), 0) > 0


@triton.jit
def _open(a, least, N: tl.constexpr):
    """Magnitudes below ``least``, their sum, and the room that the others leave."""
    open = tl.where(a >= least, 0.0, a)
    # small whole numbers: exact in any order
    r = N - tl.sum(tl.where((a >= least) & (a != 0.0), 1.0, 0.0), 1, keep_dims=True)
    return open, tree(open), r


@triton.jit
def water_fill(a, N: tl.constexpr):
    """Keep what has probability 1, and every larger element, until none is left: magnitudes still open, their sum, the room left."""
    least = tl.full([a.shape[0]], float("inf"), tl.float32)
    grew = True
    while grew:
        open, s, r = _open(a, least[:, None], N)
        more = (open != 0.0) & (open * r >= s) & (r > 0.0)
        now = tl.minimum(least, tl.min(tl.where(more, open, float("inf")), 1))
        grew = _any(now < least)
        least = now
    return _open(a, least[:, None], N)


@triton.jit
def exact(a, u, N: tl.constexpr):
    """Water-filling, then systematic sampling with one uniform: kept, sampled ``[groups, M]`` and the sampled magnitude ``[groups, 1]``."""
    place = tl.arange(0, a.shape[1])[None, :]
    open, s, r = water_fill(a, N)
    saturated = (open == 0.0) & (a != 0.0)
    live = (open != 0.0) & (r > 0.0)
    q = (tl.where(live, tl.div_rn(open * r, s), 0.0) * TWO_24).to(tl.int32)
    total = r.to(tl.int32)
    if N > NARROW_SUMS:
        q, total = q.to(tl.int64), total.to(tl.int64)
    total = total << 24
    sums = tl.cumsum(q, 1)
    last = tl.max(tl.where(live, place, -1), 1, keep_dims=True)
    end = tl.where(place == last, total, tl.minimum(sums, total))
    start = tl.minimum(sums - q, total)
    shift = ONE - u
    sampled = live & (((end + shift) >> 24) > ((start + shift) >> 24))
    if N == 1:
        value = s
    elif N == 2:
        value = s * tl.where(r == 2.0, 0.5, 1.0)
    else:
        value = tl.div_rn(s, r)
    return saturated, sampled, value


@triton.jit
def _drawn(a, s, u):
    """Index of the element that u draws from magnitudes ``a`` of sum ``s``, each with probability a / s: ``[groups, 1]``."""
    place = tl.arange(0, a.shape[1])[None, :]
    sums = tl.minimum(tl.cumsum((tl.div_rn(a, s) * TWO_24).to(tl.int32), 1), ONE)
    last = tl.max(tl.where(a != 0.0, place, 0), 1, keep_dims=True)
    passed = (u >= sums) & (place < last)
    return tl.sum(passed.to(tl.int32), 1, keep_dims=True)


@triton.jit
def approximate(a, s, u0, u1, M: tl.constexpr):
    """Two draws without replacement: which elements, and their magnitudes a / p, both ``[groups, M]``."""
    place = tl.arange(0, a.shape[1])[None, :]
    first = _drawn(a, s, u0)
    others = tl.where(place == first, 0.0, a)
    second = _drawn(others, tree(others), u1)
    t = tl.div_rn(a, s)
    p = t
    for j in range(M):
        here = place == j
        rest = tree(tl.where(here, 0.0, a))
        # one element differs from zero: a copy
        t_j = tl.sum(tl.where(here, t, 0.0), 1, keep_dims=True)
        p = tl.where(here, p, p + tl.div_rn(a, rest) * t_j)
    p = tl.maximum(p, 1.0 / TWO_24)
    return (place == first) | (place == second), tl.div_rn(a, p)


@triton.jit
def estimate(x, u0, u1, N: tl.constexpr, M: tl.constexpr, APPROX: tl.constexpr):
    """The estimate of a tile ``[groups, padded M]`` in the bits of its dtype, for uniforms ``[groups]`` (u1: approx only).

    A group with at most N non-zeros is copied; one whose sum is not finite becomes NaN where its mask keeps.
    """
    wide = widen(x)
    a = tl.abs(wide)
    s = tree(a)
    few = tl.sum((a != 0.0).to(tl.int32), 1, keep_dims=True) <= N
    if APPROX:
        sampled, value = approximate(a, s, u0[:, None], u1[:, None], M)
        saturated = few & few
    else:
        saturated, sampled, value = exact(a, u0[:, None], N)
    bits = bits_of(x)
    magnitude = bits_of(narrow(value, x.dtype))
    sign: tl.constexpr = -0x80000000 if x.dtype == tl.float32 else -0x8000
    out = tl.where(sampled, (bits & sign) | magnitude, 0)
    out = tl.where(few | saturated, tl.where(a != 0.0, bits, 0), out).to(bits.dtype)
    lost = (s < float("inf")) == 0
    if _any(lost):
        nan: tl.constexpr = 0x7FC00000 if x.dtype == tl.float32 else (0x7FC0 if x.dtype == tl.bfloat16 else 0x7E00)
        out = tl.where(lost, tl.where(kept(x, N, M), nan, 0), out).to(bits.dtype)
    return out


@triton.jit
def wide(x):
    """A 64-bit integer, also of an argument that Triton has made a constant."""
    return tl.full([], 0, tl.int64) + x


@triton.jit
def _column_places(column, first, length, inner, M: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr):
    """Offsets of a tile ``[GROUPS, PADDED, COLUMNS]`` and where it is within the matrix."""
    place = tl.arange(0, PADDED)[None, :, None]
    columns = column + tl.arange(0, COLUMNS)[None, None, :]
    row = (first + tl.arange(0, GROUPS)[:, None, None]) * M + place
    return row * inner + columns, (place < M) & (row < length) & (columns < inner)


@triton.jit
def load_columns(g, column, first, length, inner, M: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr):
    """Groups down a tile of columns, as ``[GROUPS * COLUMNS, PADDED]``."""
    at, there = _column_places(column, first, length, inner, M, GROUPS, COLUMNS, PADDED)
    tile = tl.load(g + at, mask=there, other=0.0)
    return tl.reshape(tl.permute(tile, [0, 2, 1]), [GROUPS * COLUMNS, PADDED])


@triton.jit
def store_columns(out, tile, column, first, length, inner, M: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
    at, there = _column_places(column, first, length, inner, M, GROUPS, COLUMNS, tile.shape[1])
    tl.store(out + at, tl.permute(tl.reshape(tile, [GROUPS, COLUMNS, tile.shape[1]]), [0, 2, 1]), mask=there)


@triton.jit
def store_transposed(out, tile, first, columns, per_line, M: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of ``load_columns`` as rows of ``per_line`` whole groups; of ``columns`` such rows from ``out`` on, the first COLUMNS."""
    i = tl.arange(0, GROUPS * COLUMNS)[:, None]
    group, column = first + i // COLUMNS, i % COLUMNS
    place = tl.arange(0, tile.shape[1])[None, :]
    there = (place < M) & (group < per_line) & (column < columns)
    tl.store(out + (column * wide(per_line) + group) * M + place, tile, mask=there)


@triton.jit
def mvue_rows_kernel(
    g, seed, out, groups,
    N: tl.constexpr, M: tl.constexpr, APPROX: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """out = mvue(g) of groups that lie side by side; TILE is a multiple of 4."""
    first = tl.program_id(0).to(tl.int64) * TILE
    x = load_groups(g, first, groups, M, TILE, PADDED)
    if APPROX:
        u0, u1 = pairs24(seed, first + tl.arange(0, TILE))
    else:
        u0 = uniforms24_of_four(seed, first // 4 + tl.arange(0, TILE // 4))
        u1 = u0
    store_groups(out, estimate(x, u0, u1, N, M, APPROX), first, groups, M)


@triton.jit
def mvue_columns_kernel(
    g, seed, out, length, inner, per_line, column_blocks, group_blocks,
    N: tl.constexpr, M: tl.constexpr, APPROX: tl.constexpr, PADDED: tl.constexpr, TRANSPOSED: tl.constexpr, GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """out = mvue(g) along the middle of ``(outer, length, inner)``, TRANSPOSED ``(outer, inner, per_line * M)``.

    Neighbouring programs take neighbouring columns. Group g of line l has the random number l * per_line + g.
    """
    program = tl.program_id(0)
    column = (program % column_blocks).to(tl.int64) * COLUMNS
    first = ((program // column_blocks) % group_blocks).to(tl.int64) * GROUPS
    outer = (program // column_blocks // group_blocks).to(tl.int64)
    line = outer * inner + column
    x = load_columns(g + outer * length * inner, column, first, length, inner, M, GROUPS, COLUMNS, PADDED)
    i = tl.arange(0, GROUPS * COLUMNS)
    j = (line + i % COLUMNS) * per_line + first + i // COLUMNS
    if APPROX:
        u0, u1 = pairs24(seed, j)
    else:
        u0 = uniforms24(seed, j)
        u1 = u0
    tile = estimate(x, u0, u1, N, M, APPROX)
    if TRANSPOSED:
        store_transposed(out + line * per_line * M, tile, first, inner - column, per_line, M, GROUPS, COLUMNS)
    else:
        store_columns(out + outer * length * inner, tile, column, first, length, inner, M, GROUPS, COLUMNS)


def _estimate(given: Around, n: int, m: int, seed: Tensor, method: str, out: Tensor, transposed: bool) -> None:
    """Start the kernel that writes the dense estimate: like g, or transposed: ``(outer, inner, length in whole groups)``."""
    g, outer, length, inner = given
    padded = next_power_of_2(m)
    consts = {"N": n, "M": m, "APPROX": method == "approx", "PADDED": padded}
    if inner == 1 and length % m == 0:
        count, tile = outer * length // m, max(4, ELEMENTS // padded)
        launch(mvue_rows_kernel, cdiv(count, tile), (g, seed, as_integers(out), count), **consts, TILE=tile)
        return
    columns = 64 if padded <= 8 else 32 if padded == 16 else 16 if padded <= 128 else 8
    groups, per_line = max(1, COLUMN_BYTES // (padded * columns * g.element_size())), cdiv(length, m)
    blocks = cdiv(inner, columns), cdiv(per_line, groups)
    args = (g, seed, as_integers(out), length, inner, per_line, *blocks)
    launch(mvue_columns_kernel, outer * blocks[0] * blocks[1], args, **consts, TRANSPOSED=transposed, GROUPS=groups, COLUMNS=columns)


def mvue(g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str, out: Tensor | None = None) -> Tensor:
    result = g.new_empty(g.shape) if out is None else out
    _estimate(around(g, dim), n, m, seed.contiguous(), method, result, transposed=False)
    return result


def mvue_compress(
    g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """``nm_mvue_compress``: a dense estimate, transposed, whose non-zeros are its N largest of each group."""
    p, lead, given = Pattern(n, m), g.movedim(dim, -1).shape[:-1], around(g, dim, turn=True)
    groups = p.groups(given.length)
    if out is None:
        out = g.new_empty(*lead, groups * n), g.new_empty(*lead, p.index_bytes(given.length), dtype=torch.uint8)
    dense = g.new_empty(given.outer * given.inner, groups * m)
    _estimate(given, n, m, seed.contiguous(), method, dense, transposed=True)
    compress(dense, n, m, out=out)
    return out
