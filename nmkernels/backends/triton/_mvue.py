"""Device functions of MVUE: the estimate of a tile of groups ``[groups, padded M]``, for given 24-bit uniforms.

The same arithmetic in the same order as ``reference/mvue.py`` and ``csrc/core/mvue.h``, where the method is explained.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._groups import bits_of, kept, narrow, widen

ONE = tl.constexpr(1 << 24)
"""1 as a 24-bit fixed-point probability."""

TWO_24 = tl.constexpr(float(1 << 24))

NARROW_SUMS = tl.constexpr(120)
"""Up to this N, running sums of N·2^24 and one more fit in int32."""


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
    """Whether any element of a tensor of truth values is true."""
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
    """Keep the elements whose probability reaches 1 until none does: magnitudes still open, their sum and the room that is left.

    With an element every larger one is kept, so that the least magnitude kept is all that a round hands on.
    """
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
