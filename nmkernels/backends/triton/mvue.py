"""mvue: the minimum-variance unbiased N:M estimate, along the last dimension or another one.

Memory is viewed as ``(outer, length, inner)`` around the grouped dimension. Along the last one (inner = 1) groups are contiguous; along
another they run down the columns. The random number of group g of line l has index l * groups per line + g. ``reference/mvue.py`` and
``csrc/core/mvue.h`` explain the method; the arithmetic and its order are the same. Random words are Philox4x32-7 (Salmon et al., SC 2011).
Kernels read the seed tensor, int64 (seed, offset), from memory, so that a captured graph replays with its current value.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...reference import has_level_rule
from ..shared import around, in_layout, packed
from .compress import as_integers, compress
from .groups import ELEMENTS, bits_of, kept, load_groups, narrow, store_groups, widen
from .launch import cdiv, launch, next_power_of_2

ONE = tl.constexpr(1 << 24)
"""1 as a 24-bit fixed-point probability."""

TWO_24 = tl.constexpr(float(1 << 24))


@triton.jit
def philox(key, offset, counter):
    """The four words of each int64 ``counter``: key = (seed lo, hi), counter words = (counter lo, hi, offset lo, hi). uint32."""
    c0, c1 = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    c2, c3 = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    # the key words grow by a constant per round; computed in 64 bits and cut by the cast, so nothing overflows
    high = key >> 32
    for r in tl.static_range(7):
        k0, k1 = (key + r * 0x9E3779B9).to(tl.uint32), (high + r * 0xBB67AE85).to(tl.uint32)
        a, b = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32).to(tl.uint32) ^ c1 ^ k0, b.to(tl.uint32), (a >> 32).to(tl.uint32) ^ c3 ^ k1, a.to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def words_of(key, offset, j):
    """One uint32 word for each int64 ``j``: word j & 3 of counter j >> 2."""
    w0, w1, w2, w3 = philox(key, offset, j >> 2)
    word = (j & 3).to(tl.int32)
    low = tl.where(word == 0, w0, w1)
    high = tl.where(word == 2, w2, w3)
    return tl.where(word < 2, low, high)


@triton.jit
def words_of_four(key, offset, block):
    """The words of 4 block to 4 block + 3 for a vector of blocks: a quarter of the work."""
    w0, w1, w2, w3 = philox(key, offset, block)
    # joined as (w0, w2), (w1, w3), so that the new dimensions are in the order 0, 1, 2, 3
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [4 * block.shape[0]])


@triton.jit
def tree(x):
    """Sum of each row as a balanced binary tree over the index: ((x0 + x1) + (x2 + x3)) + ..., ``[groups, 1]``."""
    if x.shape[1] == 1:
        return x
    else:
        # the sum of two numbers does not depend on the order of the reduction
        return tree(tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), 2))


@triton.jit
def _any(x):
    return tl.max(tl.reshape(x.to(tl.int32), [x.numel]), 0) > 0


@triton.jit
def _open(a, least, N: tl.constexpr):
    """Magnitudes below ``least``, their sum, and N minus the number of the others."""
    open = tl.where(a >= least, 0.0, a)
    # small integers: exact in any order
    r = N - tl.sum(tl.where((a >= least) & (a != 0.0), 1.0, 0.0), 1, keep_dims=True)
    return open, tree(open), r


@triton.jit
def water_fill(a, N: tl.constexpr):
    """Repeatedly keep elements with probability 1, and all larger ones: the remaining magnitudes, their sum, and the remaining N."""
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
    index = tl.arange(0, a.shape[1])[None, :]
    open, s, r = water_fill(a, N)
    saturated = (open == 0.0) & (a != 0.0)
    live = (open != 0.0) & (r > 0.0)
    q = (tl.where(live, tl.div_rn(open * r, s), 0.0) * TWO_24).to(tl.int32)
    total = r.to(tl.int32)
    if N > 120:  # up to here running sums below (N + 1)·2^24 fit in int32
        q, total = q.to(tl.int64), total.to(tl.int64)
    total = total << 24
    sums = tl.cumsum(q, 1)
    last = tl.max(tl.where(live, index, -1), 1, keep_dims=True)
    end = tl.where(index == last, total, tl.minimum(sums, total))
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
    """Index of the element that u draws from magnitudes ``a`` with sum ``s``, each with probability a / s: ``[groups, 1]``."""
    index = tl.arange(0, a.shape[1])[None, :]
    sums = tl.minimum(tl.cumsum((tl.div_rn(a, s) * TWO_24).to(tl.int32), 1), ONE)
    last = tl.max(tl.where(a != 0.0, index, 0), 1, keep_dims=True)
    passed = (u >= sums) & (index < last)
    return tl.sum(passed.to(tl.int32), 1, keep_dims=True)


@triton.jit
def approximate(a, s, u0, u1, M: tl.constexpr):
    """Two draws without replacement: the mask of the drawn elements, and magnitudes a / p, both ``[groups, M]``."""
    index = tl.arange(0, a.shape[1])[None, :]
    first = _drawn(a, s, u0)
    without_first = tl.where(index == first, 0.0, a)
    second = _drawn(without_first, tree(without_first), u1)
    t = tl.div_rn(a, s)
    p = t
    for j in range(M):
        at_j = index == j
        rest = tree(tl.where(at_j, 0.0, a))
        # only one element is non-zero, so this is a copy
        t_j = tl.sum(tl.where(at_j, t, 0.0), 1, keep_dims=True)
        p = tl.where(at_j, p, p + tl.div_rn(a, rest) * t_j)
    p = tl.maximum(p, 1.0 / TWO_24)
    return (index == first) | (index == second), tl.div_rn(a, p)


@triton.jit
def by_level(a, word, N: tl.constexpr, M: tl.constexpr, dtype: tl.constexpr):
    """Systematic sampling in floats as in ``reference/mvue.py``: the mask of the sampled elements, and magnitudes, both ``[groups, M]``."""
    index = tl.arange(0, M)[None, :]
    h = tree(a)
    if N == 2:
        h = h * 0.5
        for i in tl.static_range(M):
            h = tl.minimum(h, tree(tl.where(index == i, 0.0, a)))
    # scaled if it is below the normal range, or sums would not be finite
    up = tl.where(h < 2.0**-126, 2.0**64, tl.where(h >= 2.0**124, 2.0**-64, 1.0))
    level = ((h * up).to(tl.int32, bitcast=True) & -8).to(tl.float32, bitcast=True)
    base = ((level.to(tl.int32, bitcast=True) & 0x7F800000) + (3 << 23)).to(tl.float32, bitcast=True)
    if M < 16:
        mark = ((word >> 9) & 0x7FFF80) | 0x3F800040
    else:
        mark = ((word >> 9) & 0x7FFF00) | 0x3F800080
    second = base + mark.to(tl.float32, bitcast=True) * level
    first = second - level
    scaled = a * up
    c = base
    one = tl.zeros_like(word).to(tl.int32)
    two = one + 1
    for i in tl.static_range(M - 1):
        # all but one are zero, so this is a copy
        c = c + tl.minimum(tl.sum(tl.where(index == i, scaled, 0.0), 1, keep_dims=True), level)
        one += (c <= first).to(tl.int32)
        if i > 0:
            two += (c <= second).to(tl.int32)
    sampled = index == one
    if N == 2:
        sampled = sampled | (index == two)
    level = level * tl.where(up == 1.0, 1.0, tl.where(up > 1.0, 2.0**-64, 2.0**64))
    # rounded to ``dtype``, up or down at random so that its mean is the level
    if dtype == tl.bfloat16:
        level = ((level.to(tl.int32, bitcast=True) + (word & 0xFFFF).to(tl.int32)) & -0x10000).to(tl.float32, bitcast=True)
    elif dtype == tl.float16:
        # below its normal range float16 is fixed point with quantum 2^-24, like floats from 2^-14 on with 10 bits
        shift = tl.where(level < 2.0**-14, 2.0**-14, 0.0)
        bits = (level + shift).to(tl.int32, bitcast=True)
        level = ((bits + (word & 0x1FFF).to(tl.int32)) & -0x2000).to(tl.float32, bitcast=True) - shift
    return sampled, tl.maximum(a, level)


@triton.jit
def estimate(x, w0, w1, N: tl.constexpr, M: tl.constexpr, APPROX: tl.constexpr, BY_LEVEL: tl.constexpr):
    """Estimate a tile ``[groups, padded M]`` from words ``[groups]`` (w1: approx only); returns bits.

    A group with at most N non-zeros is copied; one whose sum is not finite becomes NaN at its mask.
    """
    wide = widen(x)
    a = tl.abs(wide)
    s = tree(a)
    few = tl.sum((a != 0.0).to(tl.int32), 1, keep_dims=True) <= N
    saturated = few
    if APPROX:
        sampled, value = approximate(a, s, (w0 >> 8).to(tl.int32)[:, None], (w1 >> 8).to(tl.int32)[:, None], M)
    elif BY_LEVEL:
        sampled, value = by_level(a, w0[:, None], N, M, x.dtype)
    else:
        saturated, sampled, value = exact(a, (w0 >> 8).to(tl.int32)[:, None], N)
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
def mvue_kernel(
    g, seed, out, length, inner, per_line, column_blocks, group_blocks,
    N: tl.constexpr, M: tl.constexpr, APPROX: tl.constexpr, BY_LEVEL: tl.constexpr, PADDED: tl.constexpr, TRANSPOSED: tl.constexpr,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out = mvue(g) along the middle of ``(outer, length, inner)``; if TRANSPOSED, out is ``(outer, inner, per_line * M)``.

    A program processes GROUPS groups in each of COLUMNS columns, the next program the next columns. COLUMNS = 1 means inner = 1.
    """
    program = tl.program_id(0)
    first = ((program // column_blocks) % group_blocks).to(tl.int64) * GROUPS
    if COLUMNS == 1:
        x = load_groups(g, first, per_line, M, GROUPS, PADDED)
        j = first + tl.arange(0, GROUPS)
    else:
        outer = (program // column_blocks // group_blocks).to(tl.int64)
        i = tl.arange(0, GROUPS * COLUMNS)
        group, column = first + i // COLUMNS, (program % column_blocks).to(tl.int64) * COLUMNS + i % COLUMNS
        index = tl.arange(0, PADDED)[None, :]
        row = group[:, None] * M + index
        at = (outer * length + row) * inner + column[:, None]
        there = (index < M) & (row < length) & (column < inner)[:, None]
        x = tl.load(g + at, mask=there, other=0.0)
        j = (outer * inner + column) * per_line + group
    if APPROX:
        w0, w1, _w2, _w3 = philox(tl.load(seed), tl.load(seed + 1), j)
    elif COLUMNS == 1:
        w0 = words_of_four(tl.load(seed), tl.load(seed + 1), first // 4 + tl.arange(0, GROUPS // 4))
        w1 = w0
    else:
        w0 = words_of(tl.load(seed), tl.load(seed + 1), j)
        w1 = w0
    tile = estimate(x, w0, w1, N, M, APPROX, BY_LEVEL)
    if COLUMNS == 1:
        store_groups(out, tile, first, per_line, M)
    elif TRANSPOSED:
        inside = (index < M) & ((group < per_line) & (column < inner))[:, None]
        tl.store(out + j[:, None] * M + index, tile, mask=inside)
    else:
        tl.store(out + at, tile, mask=there)


def _estimate(walk: tuple[Tensor, int, int, int], n: int, m: int, seed: Tensor, method: str, out: Tensor, transposed: bool) -> None:
    """Launch the kernel that writes the dense estimate, like g or transposed: ``(outer, inner, length in whole groups)``."""
    g, outer, length, inner = walk
    padded = next_power_of_2(m)
    if inner == 1 and length % m == 0:
        outer, length = 1, outer * length
        columns, groups = 1, max(4, ELEMENTS // padded)
    else:
        columns = 64 if padded <= 8 else 32 if padded == 16 else 16 if padded <= 128 else 8
        groups = max(1, 4096 // (padded * columns * g.element_size()))  # bytes of a tile, which is transposed in shared memory
    per_line = cdiv(length, m)
    blocks = cdiv(inner, columns), cdiv(per_line, groups)
    approx = method == "approx"
    consts = {"N": n, "M": m, "APPROX": approx, "BY_LEVEL": not approx and has_level_rule(n, m), "PADDED": padded, "TRANSPOSED": transposed}
    args = (g, seed, as_integers(out), length, inner, per_line, *blocks)
    launch(mvue_kernel, outer * blocks[0] * blocks[1], args, **consts, GROUPS=groups, COLUMNS=columns)


def mvue(g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str, out: Tensor | None = None) -> Tensor:
    result = g.new_empty(g.shape) if out is None else out
    _estimate(around(g, dim), n, m, seed.contiguous(), method, result, transposed=False)
    return result


def mvue_compress(
    g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str, layout: str = "canonical", out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """``nm_mvue_compress``: a dense transposed estimate, then compressed; its non-zeros are the N largest of each group."""
    if layout != "canonical":
        return in_layout(mvue_compress(g, n, m, dim, seed, method), g.shape[dim], layout, out)
    walk, groups = around(g, dim, transposed=True), cdiv(g.shape[dim], m)
    if out is None:
        out = packed(g, g.movedim(dim, -1).shape[:-1], g.shape[dim], n, m)
    dense = g.new_empty(walk[1] * walk[3], groups * m)
    _estimate(walk, n, m, seed.contiguous(), method, dense, transposed=True)
    compress(dense, n, m, out=out)
    return out
