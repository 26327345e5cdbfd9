"""transposable_mask for 2:4: the best of the 90 patterns of each 4 x 4 tile, without trying all 90.

With r0 ... r3 the sums of each row's six pairs, a pattern's score is (r0[i] + r1[j]) + (r2[k] + r3[q]), every sum rounded. The columns that
i and j fill leave few (k, q): one for i = j, six for j opposite i (pairs i and 5 - i have no column in common), else (5 - i, 5 - j) and its
reverse. Rounded addition is monotone, so the best score over i and j is that of the largest lower half L(i, j), to the bit, and the first
best pattern begins with the first (i, j) whose upper half reaches the best score together with L(i, j). Then its lower halves are tried in
order, rounded as they are, for a smaller one may reach the score too. That is 36 scores for 90.

Scores are compared as integers, which order as non-negative floats do, NaN above infinity; clamped to infinity a NaN counts as one: a
sum that has a NaN for a term is NaN where the definition, which replaces NaN by infinity first, has infinity.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .groups import widen
from .launch import cdiv, launch, next_power_of_2

BYTES = 4 * 32 * 16
"""Of one row of a program's tiles: 4 warps that read 16 bytes a thread, one tile in float32 and two in 16 bits, for about 100 registers."""

ALL = tl.constexpr(0x01010101)
"""A row of four bool elements, all True, as one integer; columns from the lowest byte."""
PAIRS = tl.constexpr((0x00000101, 0x00010001, 0x01000001, 0x00010100, 0x01000100, 0x01010000))
"""The six rows with two True, in the order of ``reference.transposable.PAIRS``."""


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(x):
    return x.to(tl.float32, bitcast=True)


@triton.jit
def _pair_sums(a, b, c, d):
    """The magnitudes of one row, pair by pair."""
    a, b, c, d = tl.abs(a), tl.abs(b), tl.abs(c), tl.abs(d)
    return a + b, a + c, a + d, b + c, b + d, c + d


@triton.jit
def _larger(a, b):
    """The larger of two non-negative floats; NaN where one is."""
    return _float(tl.maximum(_bits(a), _bits(b)))


@triton.jit
def _largest(t):
    return tl.maximum(tl.maximum(tl.maximum(t[0], t[1]), t[2]), tl.maximum(tl.maximum(t[3], t[4]), t[5]))


@triton.jit
def _either(p, s, i: tl.constexpr, j: tl.constexpr):
    """The larger lower half below the pairs i and j of the upper rows."""
    return _larger(p[i] + s[j], p[j] + s[i])


@triton.jit
def _scores(a, r, e0, e1, e2, e3, e4, e5):
    """The best scores with the sum ``a`` in row 0 and each pair in row 1, as integers; e: the largest lower half for each."""
    return (
        _bits((a + r[0]) + e0),
        _bits((a + r[1]) + e1),
        _bits((a + r[2]) + e2),
        _bits((a + r[3]) + e3),
        _bits((a + r[4]) + e4),
        _bits((a + r[5]) + e5),
    )


@triton.jit
def _reaching(t, best):
    """Which of the first five of six scores reach the best; the sixth is taken where none does."""
    return t[0] >= best, t[1] >= best, t[2] >= best, t[3] >= best, t[4] >= best


@triton.jit
def _first(hit, x0, x1, x2, x3, x4, x5):
    """The first that is hit."""
    rest = tl.where(hit[2], x2, tl.where(hit[3], x3, tl.where(hit[4], x4, x5)))
    return tl.where(hit[0], x0, tl.where(hit[1], x1, rest))


@triton.jit
def _of_pair(row, x):
    """That of six things which belongs to the pair that ``row`` has True."""
    has0, has1, has2 = (row & 0x1) != 0, (row & 0x100) != 0, (row & 0x10000) != 0
    with0 = tl.where(has1, x[0], tl.where(has2, x[1], x[2]))
    return tl.where(has0, with0, tl.where(has1, tl.where(has2, x[3], x[4]), x[5]))


@triton.jit
def _lower_rows(mi, mj, upper, best, p, s, b):
    """Rows 2 and 3 of the first best pattern, whose rows 0 and 1 are ``mi`` and ``mj``. b: lower halves of opposite pairs, by row 2."""
    # below (i, j) with i < j are (5 - j, 5 - i) and then its reverse; both are one for i = j
    high, low = tl.maximum(mi, mj), tl.minimum(mi, mj)
    reached = _bits(upper + (_of_pair(high, p) + _of_pair(low, s))) >= best
    t = (_bits(upper + b[0]), _bits(upper + b[1]), _bits(upper + b[2]), _bits(upper + b[3]), _bits(upper + b[4]))
    opposite = _first(_reaching(t, best), PAIRS[5], PAIRS[4], PAIRS[3], PAIRS[2], PAIRS[1], PAIRS[0])
    unused = tl.where((mi ^ mj) == ALL, opposite, tl.where(reached, high, low))
    return ALL - unused, ALL - mi - mj + unused


@triton.jit
def _best(r0, r1, r2, r3):
    """The four rows of the first best pattern, from the pair sums of each row."""
    p, s = (r2[5], r2[4], r2[3], r2[2], r2[1], r2[0]), (r3[5], r3[4], r3[3], r3[2], r3[1], r3[0])
    b = (p[5] + s[0], p[4] + s[1], p[3] + s[2], p[2] + s[3], p[1] + s[4], p[0] + s[5])
    o = _larger(_larger(_larger(b[0], b[1]), b[2]), _larger(_larger(b[3], b[4]), b[5]))
    e01, e02, e03, e04 = _either(p, s, 0, 1), _either(p, s, 0, 2), _either(p, s, 0, 3), _either(p, s, 0, 4)
    e12, e13, e15, e24 = _either(p, s, 1, 2), _either(p, s, 1, 3), _either(p, s, 1, 5), _either(p, s, 2, 4)
    e25, e34, e35, e45 = _either(p, s, 2, 5), _either(p, s, 3, 4), _either(p, s, 3, 5), _either(p, s, 4, 5)
    t0 = _scores(r0[0], r1, p[0] + s[0], e01, e02, e03, e04, o)
    t1 = _scores(r0[1], r1, e01, p[1] + s[1], e12, e13, o, e15)
    t2 = _scores(r0[2], r1, e02, e12, p[2] + s[2], o, e24, e25)
    t3 = _scores(r0[3], r1, e03, e13, o, p[3] + s[3], e34, e35)
    t4 = _scores(r0[4], r1, e04, o, e24, e34, p[4] + s[4], e45)
    t5 = _scores(r0[5], r1, o, e15, e25, e35, e45, p[5] + s[5])
    v = (_largest(t0), _largest(t1), _largest(t2), _largest(t3), _largest(t4), _largest(t5))
    best = tl.minimum(_largest(v), 0x7F800000)
    hit = _reaching(v, best)
    mi = _first(hit, PAIRS[0], PAIRS[1], PAIRS[2], PAIRS[3], PAIRS[4], PAIRS[5])
    t = (
        _first(hit, t0[0], t1[0], t2[0], t3[0], t4[0], t5[0]),
        _first(hit, t0[1], t1[1], t2[1], t3[1], t4[1], t5[1]),
        _first(hit, t0[2], t1[2], t2[2], t3[2], t4[2], t5[2]),
        _first(hit, t0[3], t1[3], t2[3], t3[3], t4[3], t5[3]),
        _first(hit, t0[4], t1[4], t2[4], t3[4], t4[4], t5[4]),
    )
    upper = _first(hit, r0[0], r0[1], r0[2], r0[3], r0[4], r0[5])
    hit = _reaching(t, best)
    mj = _first(hit, PAIRS[0], PAIRS[1], PAIRS[2], PAIRS[3], PAIRS[4], PAIRS[5])
    upper += _first(hit, r1[0], r1[1], r1[2], r1[3], r1[4], r1[5])
    m2, m3 = _lower_rows(mi, mj, upper, best, p, s, b)
    return mi, mj, m2, m3


@triton.jit
def _row_sums(w, offset, valid, TILES: tl.constexpr):
    """The pair sums of one row of ``TILES`` tiles."""
    x = widen(tl.load(w + offset, mask=valid, other=0.0))
    even, odd = tl.split(tl.reshape(x, [TILES, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return _pair_sums(x0, x1, x2, x3)


@triton.jit
def transposable_mask_kernel(w, out, bands, per_band, across, BANDS: tl.constexpr, TILES: tl.constexpr):
    """out = the masks of ``BANDS`` bands of four rows, ``TILES`` tiles of each; a row of a tile is one int32 of ``out``.

    There are ``bands`` bands of ``per_band`` tiles, and ``across`` programs side by side.
    """
    program = tl.program_id(0)
    band = (program // across).to(tl.int64) * BANDS
    tile = (program % across).to(tl.int64) * TILES
    w += band * 16 * per_band + tile * 4
    out += band * 4 * per_band + tile
    line = tl.arange(0, BANDS * TILES * 4)
    i, c = line // (TILES * 4), line % (TILES * 4)
    valid = (i < bands - band) & (c < (per_band - tile) * 4)
    stride = tl.cast(per_band, tl.int64) * 4
    at = i * (16 * per_band) + c
    r0 = _row_sums(w, at, valid, BANDS * TILES)
    r1 = _row_sums(w + stride, at, valid, BANDS * TILES)
    r2 = _row_sums(w + 2 * stride, at, valid, BANDS * TILES)
    r3 = _row_sums(w + 3 * stride, at, valid, BANDS * TILES)
    m0, m1, m2, m3 = _best(r0, r1, r2, r3)
    line = tl.arange(0, BANDS * TILES)
    i, c = line // TILES, line % TILES
    valid = (i < bands - band) & (c < per_band - tile)
    at = i * (4 * per_band) + c
    stride = stride // 4
    tl.store(out + at, m0, mask=valid)
    tl.store(out + stride + at, m1, mask=valid)
    tl.store(out + 2 * stride + at, m2, mask=valid)
    tl.store(out + 3 * stride + at, m3, mask=valid)


def transposable_mask(w: Tensor, n: int, m: int, out: Tensor | None = None) -> Tensor:
    w = w.resolve_neg().contiguous()
    result = torch.empty_like(w, dtype=torch.bool) if out is None else out
    if not w.numel():
        return result
    # a row of a tile is written as one integer, for which only a caller's out may lie wrong
    aligned = out is None or out.data_ptr() % 4 == 0
    memory = result if aligned else torch.empty_like(result)
    per_band = w.shape[-1] // m
    bands = w.numel() // (per_band * m * m)
    block = BYTES // (m * w.element_size())
    tiles = min(block, next_power_of_2(per_band))
    across, height = cdiv(per_band, tiles), block // tiles
    args = (w, memory.view(torch.int32), bands, per_band, across)
    launch(transposable_mask_kernel, cdiv(bands, height) * across, args, BANDS=height, TILES=tiles)
    return result if aligned else result.copy_(memory)
