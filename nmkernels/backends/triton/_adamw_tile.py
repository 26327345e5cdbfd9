"""One tile of MaskedAdamW: where its elements lie, what happens to them, and its share of the statistics.

A row of the table describes one param: the addresses of p, m, v, max v and out, four words that every param has, then where strided a
count and the strides (row, column) of the six tensors. The gradients' addresses are a table of their own, because they alone change from
step to step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import adamw_plan as _plan
from ._groups import kept, narrow, widen

STEP, SIZE, FIRST, TILES, INNER, STRIDES = (tl.constexpr(i) for i in range(5, 11))
"""Words after the addresses of p, m, v, max v and out: the step's address; elements, or groups where strided; the first program and
the number of programs; where strided, how many groups neighbours in memory run through, those of a row or the rows."""

FLAT_WORDS, STRIDED_WORDS = 9, 22
ALIGNED, FLAT, ALONG, ACROSS = (tl.constexpr(walk) for walk in (_plan.ALIGNED, _plan.FLAT, _plan.ALONG, _plan.ACROSS))


@triton.jit
def places(row, start, M: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr, LAYOUT: tl.constexpr):
    """Which elements a tile holds: (which of them exist, their rows, columns); flat ones are numbered by their columns alone."""
    size = tl.load(row + SIZE)
    if LAYOUT <= FLAT:
        left = tl.minimum(size - start, TILE).to(tl.int32)
        if LAYOUT == ALIGNED:
            left = tl.multiple_of(left, 8)
        line = tl.arange(0, TILE)
        return line < left, line, line
    else:
        # group j of the tile is number a along the inner count and b along the outer: 64-bit division of the start alone
        inner = tl.load(row + INNER)
        j = tl.arange(0, TILE)
        rest = tl.minimum(inner - start % inner, TILE).to(tl.int32)
        short = tl.minimum(inner, TILE).to(tl.int32)
        beyond = tl.maximum(j - rest, 0)
        a = tl.where(j < rest, start % inner + j, (beyond % short).to(tl.int64))
        b = start // inner + tl.where(j < rest, 0, 1 + beyond // short)
        place = tl.arange(0, PADDED)
        row, group = (b, a) if LAYOUT == ALONG else (a, b)
        return (j < size - start)[:, None] & (place < M)[None, :], row[:, None], group[:, None] * M + place[None, :]


@triton.jit
def pointers(address, row, start, rows, cols, WHICH: tl.constexpr, DTYPE: tl.constexpr, LAYOUT: tl.constexpr):
    """Where a tile of the tensor lies whose address is at ``address``; WHICH counts p, m, v, max v, out, gradient."""
    p = tl.load(address).to(tl.pointer_type(DTYPE))
    if LAYOUT == ALIGNED:
        p = tl.multiple_of(p, 16)
    if LAYOUT <= FLAT:
        return p + start + cols
    else:
        return p + (rows * tl.load(row + STRIDES + 2 * WHICH) + cols * tl.load(row + STRIDES + 2 * WHICH + 1))


@triton.jit
def mask_of(x, N: tl.constexpr, M: tl.constexpr, LAYOUT: tl.constexpr):
    """The N:M mask of a tile, in its own shape."""
    if LAYOUT <= FLAT:
        return tl.reshape(kept(tl.reshape(x, [x.shape[0] // M, M]), N, M), [x.shape[0]])
    else:
        return kept(x, N, M)


@triton.jit
def larger(a, b):
    """The larger, or a NaN of either."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def update(m, v, ibc1, bc2, sbc2, eps, EPS_INSIDE: tl.constexpr):
    """u = (m / (1 - β1^t)) / D."""
    if EPS_INSIDE:
        denominator = tl.sqrt_rn(tl.div_rn(v, bc2) + eps)
    else:
        denominator = tl.div_rn(tl.sqrt_rn(v), sbc2) + eps
    return tl.div_rn(m * ibc1, denominator)


@triton.jit
def clamped(u, bound):
    """min(max(u, -bound), bound), NaN stays; u where the bound is 0."""
    low = tl.where(u < -bound, -bound, u)
    return tl.where(bound != 0.0, tl.where(low > bound, bound, low), u)


@triton.jit
def gradient(g, scale, MAXIMIZE: tl.constexpr):
    """±g / scale in fp32; the sign of a zero turns as well."""
    g = widen(g)
    if scale is not None:
        g = tl.div_rn(g, tl.load(scale))
    if MAXIMIZE:
        g = (g.to(tl.int32, bitcast=True) ^ -0x80000000).to(tl.float32, bitcast=True)
    return g


@triton.constexpr_function
def piece(p, g, out):
    """Neighbours in a thread of a flat tile: what the compiler makes 16 bytes of the smallest of its dtypes."""
    return 4 if all(x is None or x == tl.float32 for x in (p, g, out)) else 8


@triton.jit
def by_warp(x, PIECE: tl.constexpr):
    """A flat tile as ``[., 4, .]``, in which the middle axis is the warp: sums over the others stay inside a warp."""
    return tl.reshape(x, [x.numel // (128 * PIECE), 4, 32 * PIECE])


@triton.jit
def added(x, PIECE: tl.constexpr):
    """Σ of a tile as four numbers, of which a strided tile uses one."""
    if PIECE == 0:
        return tl.where(tl.arange(0, 4) == 0, tl.sum(tl.sum(x, 1), 0), 0)
    else:
        return tl.sum(tl.sum(by_warp(x, PIECE), 2), 0)


@triton.jit
def total(x, there, PIECE: tl.constexpr):
    """Σ of the chosen elements in float64, by warp."""
    return added(tl.where(there, x, 0.0).to(tl.float64), PIECE)


@triton.jit
def largest(u, there, PIECE: tl.constexpr):
    """The bits of the largest |u|, which are in the order of magnitudes with NaN above all; four numbers as of ``added``."""
    bits = tl.where(there, u.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    if PIECE == 0:
        return tl.where(tl.arange(0, 4) == 0, tl.max(tl.max(bits, 1), 0), 0)
    else:
        return tl.max(tl.max(by_warp(bits, PIECE), 2), 0)


@triton.jit
def second_moment(g, v, v_at, top, top_at, valid, b2, omb2, GEOMETRIC: tl.constexpr, TOP: tl.constexpr, PIECE: tl.constexpr):
    """Writes the new v and its running maximum; returns Σ|Δv|, Σ log|Δv|, 2^20 times the elements without Δv, and what the update
    divides by."""
    moved = b2 * v + omb2 * (g * g)
    tl.store(v_at, moved, mask=valid)
    step = tl.abs(moved - v)
    change, logs, counts = total(step, valid, PIECE), tl.zeros([4], tl.float64), tl.zeros([4], tl.int32)
    if GEOMETRIC:
        wide = step.to(tl.float64)
        wide = tl.log(tl.where(wide < 1.401298464324817e-45, 1.401298464324817e-45, wide))
        logs = added(tl.where(valid, wide, 0.0), PIECE)
        counts = added(((moved == v) & valid).to(tl.int32), PIECE) << 20
    if TOP:
        moved = larger(top, moved)
        tl.store(top_at, moved, mask=valid)
    return change, logs, counts, moved


@triton.jit
def joined(a, b, c, d, e, f, g, h):
    """Eight [4] as one [4, 2, 2, 2], in which the last axis tells a from e, the one before a from c, the first of them a from b."""
    return tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h)))


@triton.jit
def adamw_tile(
    row, grad, s, start, scale,
    P: tl.constexpr, G: tl.constexpr, OUT: tl.constexpr, N: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr,
    LAYOUT: tl.constexpr, FROZEN: tl.constexpr, EPS_INSIDE: tl.constexpr, MAXIMIZE: tl.constexpr, GEOMETRIC: tl.constexpr,
    TOP: tl.constexpr,
):  # fmt: skip
    """Steps one tile: reads all of it before it writes any. Returns its sums by warp, and the bits of its largest |u|."""
    PIECE: tl.constexpr = piece(P, G, OUT) if LAYOUT <= FLAT else 0
    valid, rows, cols = places(row, start, M, TILE, PADDED, LAYOUT)
    p_at = pointers(row, row, start, rows, cols, 0, P, LAYOUT)
    m_at = pointers(row + 1, row, start, rows, cols, 1, tl.float32, LAYOUT)
    v_at = pointers(row + 2, row, start, rows, cols, 2, tl.float32, LAYOUT)
    top_at = pointers(row + 3, row, start, rows, cols, 3, tl.float32, LAYOUT) if TOP else v_at
    p = tl.load(p_at, mask=valid, other=0.0)
    g = tl.load(pointers(grad, row, start, rows, cols, 5, G, LAYOUT), mask=valid, other=0.0)
    m = tl.load(m_at, mask=valid, other=0.0)
    v = tl.load(top_at if FROZEN else v_at, mask=valid, other=0.0)
    top = tl.load(top_at, mask=valid, other=0.0) if TOP else v
    b1, omb1, b2, omb2, ibc1, bc2 = tl.load(s), tl.load(s + 1), tl.load(s + 2), tl.load(s + 3), tl.load(s + 4), tl.load(s + 5)
    sbc2, eps, wdf, lr, decay, bound = tl.load(s + 6), tl.load(s + 7), tl.load(s + 8), tl.load(s + 9), tl.load(s + 10), tl.load(s + 11)
    old = widen(p)
    none = tl.zeros([4], tl.float64)
    change, logs, weights, grads, counts = none, none, none, none, tl.zeros([4], tl.int32)
    if N > 0:
        before = mask_of(p, N, M, LAYOUT)
        weights = total(tl.abs(old), valid & ~before, PIECE)
    g = gradient(g, scale, MAXIMIZE)
    if N > 0:
        grads = total(tl.abs(g), valid & ~before, PIECE)
        g = tl.where(before, g, tl.where(decay == 0.0, g, g + decay * old))
    m = b1 * m + omb1 * g
    tl.store(m_at, m, mask=valid)
    if not FROZEN:
        change, logs, counts, v = second_moment(g, v, v_at, top, top_at, valid, b2, omb2, GEOMETRIC, TOP, PIECE)
    u = update(m, v, ibc1, bc2, sbc2, eps, EPS_INSIDE)
    new = narrow(old * wdf - lr * clamped(u, bound), P)
    tl.store(p_at, new, mask=valid)
    used = valid
    if N > 0:
        after = mask_of(new, N, M, LAYOUT)
        used = valid & after
        counts += added((valid & (before ^ after)).to(tl.int32), PIECE) << 10
    if OUT is not None:
        out_at = pointers(row + 4, row, start, rows, cols, 4, OUT, LAYOUT)
        tl.store(out_at, narrow(tl.where(used, widen(new), 0.0), OUT), mask=valid)
    counts += added((used & (widen(new) != 0.0)).to(tl.int32), PIECE)
    unchanged, flips, filled = (counts >> 20).to(tl.float64), ((counts >> 10) & 1023).to(tl.float64), (counts & 1023).to(tl.float64)
    return joined(none, change, logs, unchanged, flips, weights, grads, filled), largest(u, valid, PIECE)
