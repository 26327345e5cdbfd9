"""The kernels of MaskedAdamW: the scalars of each param, one pass over all elements, and the sum of the statistics.

A row of the table describes one param: seven words that every tile needs, then for strided ones its rows and the strides (row,
column) of its six tensors. The gradients' addresses are a table of their own, because they alone change from step to step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._groups import kept, narrow, widen

STEP, SIZE, FIRST, TILES, ROWS, INNER, STRIDES = (tl.constexpr(i) for i in range(5, 12))
"""Words after the addresses of p, m, v, max v and out: the step's address; elements, or groups where strided; the first program and
the number of programs; rows; and, strided, the groups in a row or the rows (whichever neighbours in memory lie along)."""

FLAT_WORDS, STRIDED_WORDS = 9, 23
ALIGNED, FLAT, ALONG, ACROSS = (tl.constexpr(i) for i in range(4))
"""How a param lies, the flat ones first: flat with 16-byte accesses; flat; strided with neighbours along a group, or across groups."""

SCALARS = 12
STATS = 9


@triton.jit
def power(base, exponent):
    """base**exponent in float64 by squaring, lowest bit first."""
    result = tl.full([], 1.0, tl.float64)
    while exponent > 0:
        result = tl.where((exponent & 1) == 1, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


@triton.jit
def number(hyper, i: tl.constexpr, word):
    """Element i of hyper, or where the host holds it the float64 whose bits are ``word``."""
    if hyper is None:
        return word.to(tl.int64).to(tl.float64, bitcast=True)
    else:
        return tl.load(hyper + i)


@triton.jit(do_not_specialize=list(range(5, 14)))
def adamw_scalars_kernel(
    table, scalars, found, hyper, counts, t: tl.int64,
    h0: tl.int64, h1: tl.int64, h2: tl.int64, h3: tl.int64, h4: tl.int64, h5: tl.int64, h6: tl.int64, h7: tl.int64,
    WORDS: tl.constexpr, FROZEN: tl.constexpr,
):  # fmt: skip
    """One program per param: counts its step and writes the twelve fp32 numbers, each computed in float64 and rounded once."""
    if found is not None:  # noqa: SIM102 - decided while compiling; the other is a branch
        if tl.load(found) != 0.0:
            return
    i = tl.program_id(0).to(tl.int64)
    address = tl.load(table + i * WORDS + STEP)
    step = address.to(tl.pointer_type(tl.float32))
    count = tl.load(step, mask=address != 0, other=0.0) + 1.0
    tl.store(step, count, mask=address != 0)
    given = t.to(tl.int64) if counts is None else tl.load(counts + i)
    now = tl.where(address != 0, count.to(tl.int64), given)
    lr, beta1, beta2 = number(hyper, 0, h0), number(hyper, 1, h1), number(hyper, 2, h2)
    at = now
    if FROZEN:
        at = number(hyper, 6, h6).to(tl.int64)
    bc2 = 1.0 - power(beta2, at)
    if FROZEN:
        bc2 = tl.where(at == 0, 1.0, bc2)
    s = scalars + i * 12
    tl.store(s, beta1.to(tl.float32))
    tl.store(s + 1, (1.0 - beta1).to(tl.float32))
    tl.store(s + 2, beta2.to(tl.float32))
    tl.store(s + 3, (1.0 - beta2).to(tl.float32))
    tl.store(s + 4, (1.0 / (1.0 - power(beta1, now))).to(tl.float32))
    tl.store(s + 5, bc2.to(tl.float32))
    tl.store(s + 6, tl.sqrt(bc2).to(tl.float32))
    tl.store(s + 7, number(hyper, 3, h3).to(tl.float32))
    tl.store(s + 8, (1.0 - lr * number(hyper, 4, h4)).to(tl.float32))
    tl.store(s + 9, lr.to(tl.float32))
    tl.store(s + 10, number(hyper, 5, h5).to(tl.float32))
    tl.store(s + 11, number(hyper, 7, h7).to(tl.float32))


@triton.jit
def owners_kernel(table, owners, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """owners[program] = the param whose tile it takes; one program here per param."""
    i = tl.program_id(0)
    row = table + i.to(tl.int64) * WORDS
    first, tiles = tl.load(row + FIRST), tl.load(row + TILES)
    at = tl.arange(0, BLOCK)
    done = tl.zeros([], tl.int64)
    while done < tiles:
        tl.store(owners + first + done + at, tl.zeros([BLOCK], tl.int32) + i, mask=at < tiles - done)
        done += BLOCK


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
        if LAYOUT == ALONG:
            return (j < size - start)[:, None] & (place < M)[None, :], b[:, None], a[:, None] * M + place[None, :]
        else:
            return (j < size - start)[None, :] & (place < M)[:, None], a[None, :], b[None, :] * M + place[:, None]


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
    elif LAYOUT == ALONG:
        return kept(x, N, M)
    else:
        return tl.trans(kept(tl.trans(x), N, M))


@triton.jit
def larger(a, b):
    """The larger, or a NaN of either."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def update(m, v, s, EPS_INSIDE: tl.constexpr):
    """u = (m / (1 - β1^t)) / D."""
    eps = tl.load(s + 7)
    if EPS_INSIDE:
        denominator = tl.sqrt_rn(tl.div_rn(v, tl.load(s + 5)) + eps)
    else:
        denominator = tl.div_rn(tl.sqrt_rn(v), tl.load(s + 6)) + eps
    return tl.div_rn(m * tl.load(s + 4), denominator)


@triton.jit
def clamped(u, bound):
    """min(max(u, -bound), bound), NaN stays; u where the bound is 0."""
    low = tl.where(u < -bound, -bound, u)
    return tl.where(bound != 0.0, tl.where(low > bound, bound, low), u)


@triton.jit
def total(x, valid):
    """Σ of the existing elements in float64."""
    return tl.sum(tl.where(valid, x, 0.0).to(tl.float64))


@triton.jit
def second_moment(g, v_at, top_at, valid, s, to, total_programs, FROZEN: tl.constexpr, TOP: tl.constexpr, GEOMETRIC: tl.constexpr):
    """Advances v and its maximum unless frozen, and returns the one that the update divides by."""
    if FROZEN:
        return tl.load(top_at if TOP else v_at, mask=valid, other=0.0)
    else:
        v = tl.load(v_at, mask=valid, other=0.0)
        new = tl.load(s + 2) * v + tl.load(s + 3) * (g * g)
        tl.store(v_at, new, mask=valid)
        change = tl.abs(new - v)
        tl.store(to + total_programs, total(change, valid))
        if GEOMETRIC:
            wide = change.to(tl.float64)
            logs = tl.log(tl.where(wide < 1.401298464324817e-45, 1.401298464324817e-45, wide))
            tl.store(to + 2 * total_programs, tl.sum(tl.where(valid, logs, 0.0)))
            tl.store(to + 3 * total_programs, tl.sum(((new == v) & valid).to(tl.int32)).to(tl.float64))
        if TOP:
            new = larger(tl.load(top_at, mask=valid, other=0.0), new)
            tl.store(top_at, new, mask=valid)
        return new


@triton.jit
def gradient(g, scale, MAXIMIZE: tl.constexpr):
    """±g / scale in fp32; the sign of a zero turns as well."""
    g = widen(g)
    if scale is not None:
        g = tl.div_rn(g, tl.load(scale))
    if MAXIMIZE:
        g = (g.to(tl.int32, bitcast=True) ^ -0x80000000).to(tl.float32, bitcast=True)
    return g


@triton.jit(do_not_specialize=["offset", "programs"])
def adamw_kernel(
    table, grads, owners, scalars, partials, offset: tl.int64, programs: tl.int64, scale, found,
    P: tl.constexpr, G: tl.constexpr, OUT: tl.constexpr, N: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr,
    WORDS: tl.constexpr, LAYOUT: tl.constexpr, FROZEN: tl.constexpr, EPS_INSIDE: tl.constexpr, MAXIMIZE: tl.constexpr,
    GEOMETRIC: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """One tile of one param: read, update, write, and the tile's share of the statistics into ``partials[statistic, program]``."""
    if found is not None:  # noqa: SIM102 - decided while compiling; the other is a branch
        if tl.load(found) != 0.0:
            return
    program = tl.program_id(0).to(tl.int64) + offset
    i = tl.load(owners + program).to(tl.int64)
    row, s, to = table + i * WORDS, scalars + i * 12, partials + program
    start = (program - tl.load(row + FIRST)) * TILE
    valid, rows, cols = places(row, start, M, TILE, PADDED, LAYOUT)
    p_at = pointers(row, row, start, rows, cols, 0, P, LAYOUT)
    m_at = pointers(row + 1, row, start, rows, cols, 1, tl.float32, LAYOUT)
    v_at = pointers(row + 2, row, start, rows, cols, 2, tl.float32, LAYOUT)
    top_at = pointers(row + 3, row, start, rows, cols, 3, tl.float32, LAYOUT) if TOP else v_at
    p = tl.load(p_at, mask=valid, other=0.0)
    g = gradient(tl.load(pointers(grads + i, row, start, rows, cols, 5, G, LAYOUT), mask=valid, other=0.0), scale, MAXIMIZE)
    old = widen(p)
    if N > 0:
        before = mask_of(p, N, M, LAYOUT)
        tl.store(to + 5 * programs, total(tl.abs(old), valid & ~before))
        tl.store(to + 6 * programs, total(tl.abs(g), valid & ~before))
        decay = tl.load(s + 10)
        g = tl.where(before, g, tl.where(decay == 0.0, g, g + decay * old))
    m = tl.load(s) * tl.load(m_at, mask=valid, other=0.0) + tl.load(s + 1) * g
    tl.store(m_at, m, mask=valid)
    v = second_moment(g, v_at, top_at, valid, s, to, programs, FROZEN, TOP, GEOMETRIC)
    u = update(m, v, s, EPS_INSIDE)
    largest = tl.max(tl.where(valid, u.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0).reshape([u.numel]), 0)
    tl.store(to + 8 * programs, largest.to(tl.float32, bitcast=True).to(tl.float64))
    new = narrow(old * tl.load(s + 8) - tl.load(s + 9) * clamped(u, tl.load(s + 11)), P)
    tl.store(p_at, new, mask=valid)
    used = valid
    if N > 0:
        after = mask_of(new, N, M, LAYOUT)
        used = valid & after
        tl.store(to + 4 * programs, tl.sum((valid & (before ^ after)).to(tl.int32)).to(tl.float64))
    tl.store(to + 7 * programs, tl.sum((used & (widen(new) != 0.0)).to(tl.int32)).to(tl.float64))
    if OUT is not None:
        out_at = pointers(row + 4, row, start, rows, cols, 4, OUT, LAYOUT)
        tl.store(out_at, narrow(tl.where(used, widen(new), 0.0), OUT), mask=valid)


@triton.jit(do_not_specialize=["programs"])
def adamw_stats_kernel(partials, stats, found, programs: tl.int64, ON: tl.constexpr, BLOCK: tl.constexpr):
    """stats[k] = Σ (k = 8: the largest, or NaN) of row k of the partials; one program per statistic, always in the same order."""
    k = tl.program_id(0)
    applied = 1.0
    if found is not None:
        applied = tl.where(tl.load(found) != 0.0, 0.0, 1.0)
    at = tl.arange(0, BLOCK)
    added = tl.zeros([BLOCK], tl.float64)
    highest = tl.zeros([BLOCK], tl.int64)
    on = (((ON >> k) & 1) == 1) & (applied != 0.0)
    count = tl.where(on, programs, 0).to(tl.int64)
    first = tl.zeros([], tl.int64)
    while first < count:
        x = tl.load(partials + k * programs.to(tl.int64) + first + at, mask=at < count - first, other=0.0)
        added += x
        highest = tl.maximum(highest, x.to(tl.int64, bitcast=True))
        first += BLOCK
    result = tl.where(k == 8, tl.max(highest, 0).to(tl.float64, bitcast=True), tl.sum(added, 0))
    tl.store(stats + k, tl.where(k == 0, applied, result))
