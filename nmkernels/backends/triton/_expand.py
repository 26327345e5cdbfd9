"""The compressed operand of a product in registers: its packed values and index bytes, and the dense tile that they stand for.

Two ways. By *words*, for N of 1, 2 or 4 and M a power of two from 4 to 32: the N values of a group are one integer, the indices of
several groups another, each read once; a value is shifted to its place inside 64 bits, which are four 16-bit columns or two of 32.
*Piecewise*, for every other pattern and for memory that is not aligned: N values and N index bytes of each group one after the other,
compared with every place.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def word_pointers(
    values, indices, row, group, groups, index_row, N: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr
):
    """Pointers to the words of values ``[rows, GROUPS]`` and of indices, from group ``group`` on, a multiple of GROUPS.

    EVEN is a power of two that divides ``groups``: from it the compiler knows how wide it may read.
    """
    BYTES: tl.constexpr = values.dtype.element_ty.primitive_bitwidth // 8
    WORD: tl.constexpr = tl.uint16 if N * BYTES == 2 else tl.uint32 if N * BYTES == 4 else tl.uint64
    PER: tl.constexpr = 32 // (BITS * N)
    w = values.to(tl.pointer_type(WORD), bitcast=True) + row[:, None] * (groups // EVEN * EVEN) + (group + tl.arange(0, GROUPS))[None, :]
    i = indices.to(tl.pointer_type(tl.uint32), bitcast=True)
    return w, i + row[:, None] * (index_row // 4) + (group // PER + tl.arange(0, GROUPS // PER))[None, :]


@triton.jit
def load_words(
    w, i, group, groups, index_row, inside, N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, WHOLE: tl.constexpr
):
    """Words of values and indices at such pointers; zeros past the last group, and in rows that are not ``inside``."""
    PER: tl.constexpr = 32 // (BITS * N)
    if WHOLE:
        return tl.load(w), tl.load(i)
    else:
        left = groups - group
        v = tl.load(w, mask=(tl.arange(0, GROUPS) < left)[None, :] & inside[:, None], other=0)
        words = index_row // 4 - group // PER
        return v, tl.load(i, mask=(tl.arange(0, GROUPS // PER) < words)[None, :] & inside[:, None], other=0)


@triton.jit
def spread_pieces(
    values, indices, row, inside, group, groups, index_row,
    N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The dense tile ``[rows, GROUPS * PADDED]`` from group ``group`` on, one stored value after the other."""
    at = group + tl.arange(0, GROUPS)
    mask = inside[:, None] & (at < groups)[None, :]
    place = tl.arange(0, PADDED)[None, None, :]
    dense = tl.zeros([row.shape[0], GROUPS, PADDED], values.dtype.element_ty)
    for j in range(N):
        k = at.to(tl.int64) * N + j
        v = tl.load(values + row[:, None] * groups * N + k[None, :], mask=mask, other=0.0)
        byte = tl.load(indices + row[:, None] * index_row + ((k * BITS) >> 3)[None, :], mask=mask, other=0).to(tl.int32)
        i = (byte >> ((k * BITS) & 7).to(tl.int32)[None, :]) & ((1 << BITS) - 1)
        dense = tl.where((place == i[:, :, None]) & (place < M), v[:, :, None], dense)
    return tl.reshape(dense, [row.shape[0], GROUPS * PADDED])


@triton.jit
def spread_words(words, packed, N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Values ``[rows, groups]``, N in an integer, and indices ``[rows, words]``, 32 bits each, as dense bits ``[rows, groups * M]``.

    WIDTH is the size of a value in bits. A value whose index is not below M, which only damaged indices are, is left out.
    """
    rows: tl.constexpr = words.shape[0]
    groups: tl.constexpr = words.shape[1]
    per: tl.constexpr = groups // packed.shape[1]
    lanes: tl.constexpr = 64 // WIDTH
    log_width: tl.constexpr = 4 if WIDTH == 16 else 5
    shift = (tl.arange(0, per) * (BITS * N)).to(tl.uint32)
    bits = packed[:, :, None] >> shift[None, None, :]
    part = tl.arange(0, M // lanes)[None, None, :]
    bits = tl.reshape(bits, [rows, groups, 1])
    words = tl.reshape(words, [rows, groups, 1])
    dense = tl.zeros([rows, groups, M // lanes], tl.uint64)
    for j in tl.static_range(N):
        value = words
        if j > 0:
            value = words >> (WIDTH * j)
        if WIDTH == 16 and N > 1 and j < N - 1:
            value = value & 0xFFFF
        at = bits
        if j > 0:
            at = bits >> (BITS * j)
        placed = value.to(tl.uint32).to(tl.uint64) << ((at & (lanes - 1)) << log_width).to(tl.uint64)
        if lanes < M:
            here = ((at & ((1 << BITS) - 1)) >> (6 - log_width)) == part
            placed = tl.where(here, placed, 0)
        dense = dense | placed
    low = dense.to(tl.uint32)
    high = (dense >> 32).to(tl.uint32)
    if WIDTH == 16:
        even = tl.join(low.to(tl.uint16), high.to(tl.uint16))
        odd = tl.join((low >> 16).to(tl.uint16), (high >> 16).to(tl.uint16))
        return tl.reshape(tl.join(even, odd), [rows, groups * M])
    else:
        return tl.reshape(tl.join(low, high), [rows, groups * M])
