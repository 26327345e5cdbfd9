"""Device functions of the compressed form: which elements of a tile are stored, and where their values and index bytes go.

A tile holds ROWS x GROUPS groups, those of one row side by side, as ``[ROWS * GROUPS, padded M]``. It starts at a group that is a multiple
of GROUPS, and GROUPS is one of 8 / bits, so that no byte of indices is shared by two tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def filled_up(keep, N: tl.constexpr, M: tl.constexpr):
    """``keep``, and in groups that keep fewer than N the lowest unkept places besides."""
    place = tl.arange(0, keep.shape[1])[None, :]
    spare = (keep == 0) & (place < M)
    missing = N - tl.sum(keep.to(tl.int32), 1, keep_dims=True)
    return keep | (spare & (tl.cumsum(spare.to(tl.int32), 1) <= missing))


@triton.jit
def _next_stored(bits, stored, after):
    """Place and value of the first stored element of each group past the place ``after``: two vectors ``[groups]``."""
    place = tl.arange(0, bits.shape[1])[None, :]
    at = tl.min(tl.where(stored & (place > after), place, 256), 1)
    # one element differs from zero at most, so that this sum is a copy
    return at, tl.sum(tl.where(place == at[:, None], bits, 0), 1).to(bits.dtype)


@triton.jit
def compacted(bits, stored, N: tl.constexpr, PADDED_N: tl.constexpr):
    """Values and places of the N stored elements of each group, in order of place: two tiles ``[groups, PADDED_N]`` of integers."""
    place = tl.arange(0, bits.shape[1])[None, :]
    if N == 2 and bits.shape[1] == 4:
        even, odd = tl.split(tl.reshape(stored, [bits.shape[0], 2, 2]))
        s0, s2 = tl.split(even)
        s1, s3 = tl.split(odd)
        even_bits, odd_bits = tl.split(tl.reshape(bits, [bits.shape[0], 2, 2]))
        b0, b2 = tl.split(even_bits)
        b1, b3 = tl.split(odd_bits)
        values = tl.join(tl.where(s0, b0, tl.where(s1, b1, b2)), tl.where(s3, b3, tl.where(s2, b2, b1)))
        places = tl.join(tl.where(s0, 0, tl.where(s1, 1, 2)), tl.where(s3, 3, tl.where(s2, 2, 1)))
    elif N == 1:
        at, v = _next_stored(bits, stored, -1)
        values, places = v[:, None], at[:, None]
    elif N == 2:
        a0, v0 = _next_stored(bits, stored, -1)
        a1, v1 = _next_stored(bits, stored, a0[:, None])
        values, places = tl.join(v0, v1), tl.join(a0, a1)
    elif N == 4:
        a0, v0 = _next_stored(bits, stored, -1)
        a1, v1 = _next_stored(bits, stored, a0[:, None])
        a2, v2 = _next_stored(bits, stored, a1[:, None])
        a3, v3 = _next_stored(bits, stored, a2[:, None])
        values = tl.reshape(tl.join(tl.join(v0, v2), tl.join(v1, v3)), [bits.shape[0], 4])
        places = tl.reshape(tl.join(tl.join(a0, a2), tl.join(a1, a3)), [bits.shape[0], 4])
    else:
        rank = tl.cumsum(stored.to(tl.int32), 1) - 1
        here = stored[:, :, None] & (rank[:, :, None] == tl.arange(0, PADDED_N)[None, None, :])
        values = tl.sum(tl.where(here, bits[:, :, None], 0), 1).to(bits.dtype)
        places = tl.sum(tl.where(here, place[:, :, None], 0), 1)
    return values, places


@triton.jit
def bytes_of(places, BITS: tl.constexpr):
    """Consecutive places of BITS bits each as bytes, little end first: ``[8 / BITS * bytes]`` to ``[bytes]``."""
    if BITS == 8:
        return places.to(tl.uint8)
    elif BITS == 4:
        low, high = tl.split(tl.reshape(places, [places.shape[0] // 2, 2]))
        return (low | (high << 4)).to(tl.uint8)
    else:
        even, odd = tl.split(tl.reshape(places, [places.shape[0] // 4, 2, 2]))
        p0, p2 = tl.split(even)
        p1, p3 = tl.split(odd)
        return (p0 | (p1 << 2) | (p2 << 4) | (p3 << 6)).to(tl.uint8)


@triton.jit
def places_of(packed, BITS: tl.constexpr):
    """The inverse of ``bytes_of``: ``[bytes]`` to ``[8 / BITS * bytes]``, int32."""
    b = packed.to(tl.int32)
    if BITS == 8:
        return b
    elif BITS == 4:
        return tl.reshape(tl.join(b & 15, b >> 4), [packed.shape[0] * 2])
    else:
        pairs = tl.join(tl.join(b & 3, (b >> 4) & 3), tl.join((b >> 2) & 3, b >> 6))
        return tl.reshape(pairs, [packed.shape[0] * 4])


@triton.jit
def _odd_bytes(places, N: tl.constexpr, BITS: tl.constexpr, PADDED_N: tl.constexpr):
    """Bytes of places when N is no power of two: 8 / BITS groups fill N bytes, ``[groups / (8 / BITS), PADDED_N]``."""
    PER: tl.constexpr = 8 // BITS
    units: tl.constexpr = places.shape[0] // PER
    slot = tl.arange(0, PER * PADDED_N)
    index = slot % PADDED_N
    bit = ((slot // PADDED_N) * N + index) * BITS
    byte = tl.where(index < N, bit >> 3, PADDED_N)
    shifted = tl.reshape(places, [units, PER * PADDED_N]) << (bit & 7)[None, :]
    here = byte[None, :, None] == tl.arange(0, PADDED_N)[None, None, :]
    return tl.sum(tl.where(here, shifted[:, :, None], 0), 1).to(tl.uint8)


@triton.jit
def store_packed(
    values, indices, bits, stored, row, first, rows, per_row, row_bytes,
    N: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, PADDED_N: tl.constexpr,
):  # fmt: skip
    """Write the stored elements of a tile: rows ``row`` to ``row + ROWS``, in each the groups ``first`` to ``first + GROUPS``.

    ``row`` and ``first`` are int64; each of ``rows`` rows has ``per_row`` groups and ``row_bytes`` bytes of indices. ``bits`` are elements
    as integers; ``stored`` marks exactly N of each group that exists. ``values`` is a pointer to integers of that size.
    """
    values += row * per_row * N + first * N
    indices += row * row_bytes + (first * N * BITS) // 8
    left = per_row - first
    if BITS == 8 and (N == 3 or N > 4):
        # a byte an index and a place of its own for each: written where it belongs, without compaction
        group = tl.arange(0, ROWS * GROUPS)[:, None]
        exists = stored & (row + group // GROUPS < rows) & (group % GROUPS < left)
        offset = (group // GROUPS) * (per_row * N) + (group % GROUPS) * N + tl.cumsum(stored.to(tl.int32), 1) - 1
        tl.store(values + offset, bits, mask=exists)
        offset += (group // GROUPS) * (row_bytes - per_row * N)
        tl.store(indices + offset, tl.broadcast_to(tl.arange(0, bits.shape[1])[None, :], bits.shape).to(tl.uint8), mask=exists)
    else:
        v, places = compacted(bits, stored, N, PADDED_N)
        group = tl.arange(0, ROWS * GROUPS)[:, None]
        places = tl.where(group % GROUPS < left, places, 0)
        if PADDED_N == N:
            line = tl.arange(0, ROWS * GROUPS * N)
            r = line // (GROUPS * N)
            i = line % (GROUPS * N)
            tl.store(values + r * (per_row * N) + i, tl.reshape(v, [ROWS * GROUPS * N]), mask=(row + r < rows) & (i < left * N))
            packed = bytes_of(tl.reshape(places, [ROWS * GROUPS * N]), BITS)
            WIDTH: tl.constexpr = GROUPS * N * BITS // 8
            line = tl.arange(0, ROWS * WIDTH)
            r = line // WIDTH
            i = line % WIDTH
        else:
            i = tl.arange(0, PADDED_N)[None, :]
            r = group // GROUPS
            g = group % GROUPS
            tl.store(values + r * (per_row * N) + g * N + i, v, mask=(row + r < rows) & (g < left) & (i < N))
            packed = _odd_bytes(places, N, BITS, PADDED_N)
            UNITS: tl.constexpr = GROUPS * BITS // 8
            unit = tl.arange(0, ROWS * UNITS)[:, None]
            r = unit // UNITS
            i = tl.where(i < N, (unit % UNITS) * N + i, row_bytes)
        tl.store(indices + r * row_bytes + i, packed, mask=(row + r < rows) & (i < row_bytes - (first * N * BITS) // 8))
