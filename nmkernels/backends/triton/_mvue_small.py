"""MVUE of small groups, N <= 2 and M = 2, 4 or 8: the elements of a group are M separate tensors, and all is done within a thread.

The same bits as ``_mvue.exact`` in about half of its instructions, which bound it: some 50 for each element (sm_90, 2:4, as compiled).
"""

# ruff: noqa: RUF005 -- Triton does not compile starred expressions
from __future__ import annotations

import triton
import triton.language as tl

from ._groups import INTERPRETED, magnitude_keys, narrow, widen


@triton.jit
def appended(xs, x):
    """The tuple ``xs`` with one more element; kernels know no lists."""
    return xs + (x,)


@triton.jit
def parts(x, COUNT: tl.constexpr):
    """The columns of a tile ``[rows, COUNT]`` as a tuple."""
    if COUNT == 1:
        return (tl.reshape(x, [x.shape[0]]),)
    else:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], COUNT // 2, 2]))
        evens, odds = parts(even, COUNT // 2), parts(odd, COUNT // 2)
        out = ()
        for i in tl.static_range(COUNT // 2):
            out = appended(appended(out, evens[i]), odds[i])
        return out


@triton.jit
def joined(xs):
    """The inverse of ``parts``, with the new dimension last; any shape of the parts."""
    if len(xs) == 1:
        return tl.reshape(xs[0], xs[0].shape + [1])
    else:
        both = tl.join(joined(xs[0::2]), joined(xs[1::2]))
        return tl.reshape(both, xs[0].shape + [len(xs)])


@triton.jit
def _tree(xs):
    if len(xs) == 1:
        return xs[0]
    else:
        return _tree(xs[: len(xs) // 2]) + _tree(xs[len(xs) // 2 :])


@triton.jit
def _fma(x, y, z):
    """x·y + z rounded once. The interpreter's fma rounds twice; in float64 only a sum that misses a tie by 2^-53 would differ."""
    if INTERPRETED:
        return (x.to(tl.float64) * y.to(tl.float64) + z.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(x, y, z)


@triton.jit
def _positive(s):
    """``s``, and the least positive float32 for 0: x >= _positive(s) is x >= s and x not zero."""
    return tl.maximum(s.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)


@triton.jit
def _scale(s):
    """A power of two c with s·c in [2, 4), below 2 for a denormal s; s is positive and finite."""
    exponent = tl.maximum(s.to(tl.int32, bitcast=True) & 0x7F800000, 0x00800000)
    return (0x7F800000 - exponent).to(tl.float32, bitcast=True)


@triton.jit
def _reciprocal(s, least):
    """1 / s rounded to nearest, for s a power of two times a number in [2, 4), or times one below it whose last bit is 0.

    Two Newton steps from an approximation that is off by up to 3 units in the last place give the rounded reciprocal of every significand
    but that of all ones, which comes out one unit low, on a power of two (all 2^23 tried); ``least`` is the number after that power.
    """
    y = 1.0 / s
    one = tl.full(s.shape, 1.0, tl.float32)
    y = _fma(_fma(-s, y, one), y, y)
    y = _fma(_fma(-s, y, one), y, y)
    return tl.maximum(y, least)


@triton.jit
def _quotient(a, s, y):
    """a / s rounded to nearest, y = 1 / s rounded to nearest (Markstein 1990), where nothing underflows."""
    q = a * y
    return _fma(_fma(-q, s, a), y, q)


@triton.jit
def _masked(xs, N: tl.constexpr):
    """Whether each element is in the mask of its group."""
    out = ()
    for i in tl.static_range(len(xs)):
        above = tl.zeros(xs[0].shape, tl.int32)
        for j in tl.static_range(len(xs)):
            if j < i:
                above += (magnitude_keys(xs[j]) >= magnitude_keys(xs[i])).to(tl.int32)
            elif j > i:
                above += (magnitude_keys(xs[j]) > magnitude_keys(xs[i])).to(tl.int32)
        out = appended(out, above < N)
    return out


@triton.jit
def _carried(x):
    """The bits of x in int32, those of a 16-bit number in its upper half."""
    if x.dtype == tl.float32:
        return x.to(tl.int32, bitcast=True)
    else:
        return x.to(tl.int16, bitcast=True).to(tl.int32) << 16


@triton.jit
def uncarried(bits, dtype: tl.constexpr):
    """The inverse of ``_carried``, still as an integer."""
    if dtype == tl.float32:
        return bits
    else:
        return (bits >> 16).to(tl.int16)


@triton.jit
def _below(x, y):
    """-1 where x < y, else 0: masks of bits, because seven predicates are all that a thread has."""
    return (x - y).to(tl.int32, bitcast=True) >> 31


@triton.jit
def _water_fill(a, s, N: tl.constexpr, dtype: tl.constexpr):
    """Masks of the elements that are not kept, the magnitudes still open, their sum, and the room left, int32.

    A group with at most N <= 2 non-zeros keeps them all here, and no room is left where nothing is open.
    """
    open, free = (), ()
    room = tl.full(s.shape, N - len(a), tl.int32)
    # half of a float32 may be rounded, half of a sum of 16-bit numbers is not
    HALVE: tl.constexpr = N == 2 and dtype != tl.float32
    least = _positive(s * 0.5 if HALVE else s)
    for i in tl.static_range(len(a)):
        below = _below(a[i] if N == 1 or HALVE else a[i] + a[i], least)
        free = appended(free, below)
        open = appended(open, (a[i].to(tl.int32, bitcast=True) & below).to(tl.float32, bitcast=True))
        room -= below
    if N == 2:
        s = _tree(open)
        # only with room for one is there another round
        least = tl.where(room == 1, _positive(s), float("inf"))
        both = ()
        for i in tl.static_range(len(a)):
            below = _below(open[i], least)
            room = room & below
            both = appended(both, free[i] & below)
        return both, open, s, tl.where(s == 0.0, 0, room)
    else:
        return free, open, s, tl.where(s == 0.0, 0, room)


@triton.jit
def _sampled(open, s, room, u, N: tl.constexpr):
    """Systematic sampling of the elements still open: 0, or for the sampled minus the whole numbers passed, which is -1, rarely -2."""
    c = _scale(_positive(s))
    t = _positive(s) * c
    if N == 1:
        t *= 2.0**-24
        y = _reciprocal(t, 2.0**22 + 0.5)
    else:
        t *= tl.where(room == 2, 2.0**-25, 2.0**-24)
        y = _reciprocal(t, tl.where(room == 2, 2.0**23 + 1.0, 2.0**22 + 0.5))
    # live_later[k]: whether any of the last k + 1 is open
    later = open[len(open) - 1]
    live_later = (later > 0.0,)
    for i in tl.static_range(len(open) - 2):
        later += open[len(open) - 2 - i]
        live_later = appended(live_later, later > 0.0)
    start = (1 << 24) - u
    total = start + (room << 24)
    running = start
    passed = start >> 24
    out = ()
    for i in tl.static_range(len(open)):
        if i + 1 == len(open):
            end = total
        else:
            running += _quotient(open[i] * c, t, y).to(tl.int32)
            end = tl.minimum(running, total)
            # the last element that is open takes what is left; where there is room two are open
            if i > 0:
                end = tl.where(live_later[len(open) - 2 - i], end, total)
        out = appended(out, passed - (end >> 24))
        passed = end >> 24
    return out


@triton.jit
def exact_small(xs, u, N: tl.constexpr):
    """The estimate of groups whose elements are the tensors ``xs``, for one uniform each, in int32: see ``uncarried``."""
    dtype: tl.constexpr = xs[0].dtype
    a, bits = (), ()
    for i in tl.static_range(len(xs)):
        a = appended(a, tl.abs(widen(xs[i])))
        bits = appended(bits, _carried(xs[i]))
    s = _tree(a)
    lost = (s < float("inf")) == 0
    free, open, s, room = _water_fill(a, s, N, dtype)
    sampled = _sampled(open, s, room, u, N)
    value = _carried(narrow(s if N == 1 else s * tl.where(room == 2, 0.5, 1.0), dtype))
    found = ()
    for i in tl.static_range(len(xs)):
        taken = sampled[i] >> 31 if dtype == tl.float32 else sampled[i]
        found = appended(found, (bits[i] & ~free[i]) | (((bits[i] & -0x80000000) | value) & taken))
    if tl.max(tl.reshape(lost.to(tl.int32), [lost.numel]), 0) > 0:
        nan: tl.constexpr = 0x7E000000 if dtype == tl.float16 else 0x7FC00000
        masked, fixed = _masked(xs, N), ()
        for i in tl.static_range(len(xs)):
            fixed = appended(fixed, tl.where(lost, tl.where(masked[i], nan, 0), found[i]))
        found = fixed
    return found


@triton.jit
def uncarried_all(xs, dtype: tl.constexpr):
    """``uncarried`` of every tensor of a tuple."""
    out = ()
    for i in tl.static_range(len(xs)):
        out = appended(out, uncarried(xs[i], dtype))
    return out
