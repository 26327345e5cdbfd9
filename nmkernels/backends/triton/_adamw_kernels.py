"""The kernels of MaskedAdamW: the scalars of each param, one pass over all elements, and the sum of the statistics."""

from __future__ import annotations

import triton
import triton.language as tl

from ._adamw_tile import FIRST, STEP, TILES, adamw_tile

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


@triton.jit(do_not_specialize=["offset", "programs"])
def adamw_kernel(
    table, grads, owners, scalars, partials, offset: tl.int64, programs: tl.int64, scale, found,
    WORDS: tl.constexpr, P: tl.constexpr, G: tl.constexpr, OUT: tl.constexpr, N: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
    PADDED: tl.constexpr, LAYOUT: tl.constexpr, FROZEN: tl.constexpr, EPS_INSIDE: tl.constexpr, MAXIMIZE: tl.constexpr,
    GEOMETRIC: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """One tile of one param: read, update, write, and its share of the statistics into ``partials[statistic, program]``."""
    if found is not None:  # noqa: SIM102 - decided while compiling; the other is a branch
        if tl.load(found) != 0.0:
            return
    program = tl.program_id(0).to(tl.int64) + offset
    i = tl.load(owners + program).to(tl.int64)
    row = table + i * WORDS
    start = (program - tl.load(row + FIRST)) * TILE
    sums, largest = adamw_tile(row, grads + i, scalars + i * 12, start, scale, P, G, OUT, N, M, TILE, PADDED,
                               LAYOUT, FROZEN, EPS_INSIDE, MAXIMIZE, GEOMETRIC, TOP)  # fmt: skip
    at = tl.arange(0, 2)
    k = at[:, None, None] + 2 * at[None, :, None] + 4 * at[None, None, :]
    tl.store(partials + k * programs + program, tl.sum(sums, 0))
    tl.store(partials + 8 * programs + program, tl.max(largest, 0).to(tl.float32, bitcast=True).to(tl.float64))


@triton.jit(do_not_specialize=["programs", "slices"])
def adamw_stats_kernel(partials, stats, found, programs: tl.int64, slices: tl.int64, ON: tl.constexpr, BLOCK: tl.constexpr):
    """stats[k, j] = Σ (k = 8: the largest, or NaN) of slice j of row k of the partials, always in the same order; row 0: applied or not."""
    k, j = tl.program_id(0) // slices, tl.program_id(0) % slices
    applied = 1.0
    if found is not None:
        applied = tl.where(tl.load(found) != 0.0, 0.0, 1.0)
    share = (programs + slices - 1) // slices
    first, end = j * share, tl.minimum((j + 1) * share, programs)
    end = tl.where((((ON >> k) & 1) == 1) & (applied != 0.0), end, 0)
    at = tl.arange(0, BLOCK)
    result = tl.zeros([BLOCK], tl.float64)
    while first < end:
        x = tl.load(partials + k * programs + first + at, mask=at < end - first, other=0.0)
        # the bits of positive doubles, and of NaN above them, are in their order
        high = tl.maximum(result.to(tl.int64, bitcast=True), x.to(tl.int64, bitcast=True)).to(tl.float64, bitcast=True)
        result = tl.where(k == 8, high, result + x)
        first += BLOCK
    highest = tl.max(result.to(tl.int64, bitcast=True), 0).to(tl.float64, bitcast=True)
    result = tl.where(k == 8, highest, tl.sum(result, 0))
    tl.store(stats + k * slices + j, tl.where(k == 0, applied, result))
