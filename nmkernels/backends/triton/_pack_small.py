"""Packing small groups whose elements are separate tensors: ``_pack`` for what ``_mvue_small`` works on."""

from __future__ import annotations

import triton
import triton.language as tl

from ._mvue_small import appended, joined


@triton.jit
def compacted_small(found, N: tl.constexpr, BITS: tl.constexpr):
    """The N stored of M elements, of which at most N differ from zero, and their places in one number, the first lowest.

    What is stored besides the non-zeros is zero, at the lowest places.
    """
    COUNT: tl.constexpr = len(found)
    # of numbers of which at most one, or two, differ from zero, the exclusive or is their only one, or both mixed
    mixed = found[0]
    for i in tl.static_range(COUNT - 1):
        mixed = mixed ^ found[i + 1]
    if N == 1:
        place = tl.zeros(mixed.shape, tl.int32)
        for i in tl.static_range(COUNT - 1):
            place = tl.where(found[i + 1] != 0, i + 1, place)
        return (mixed,), place
    else:
        high, value = tl.full(mixed.shape, 1, tl.int32), found[1]
        for i in tl.static_range(COUNT - 2):
            high = tl.where(found[i + 2] != 0, i + 2, high)
            value = tl.where(found[i + 2] != 0, found[i + 2], value)
        low = tl.full(mixed.shape, COUNT - 1, tl.int32)
        for i in tl.static_range(COUNT - 2):
            low = tl.where(found[COUNT - 2 - i] != 0, COUNT - 2 - i, low)
        low = tl.where(low < high, low, 0)
        return (mixed ^ value, value), low | (high << BITS)


@triton.jit
def lined(xs):
    """Vectors as matrices of one row."""
    out = ()
    for i in tl.static_range(len(xs)):
        out = appended(out, xs[i][None, :])
    return out


@triton.jit
def turned(xs):
    """The transpose of each matrix."""
    out = ()
    for i in tl.static_range(len(xs)):
        out = appended(out, tl.trans(xs[i]))
    return out


@triton.jit
def _paired(codes, WIDTH: tl.constexpr):
    """Numbers of WIDTH bits, neighbours along the last dimension put together until they fill bytes."""
    if WIDTH == 8:
        return codes
    else:
        low, high = tl.split(tl.reshape(codes, [codes.shape[0], codes.shape[1] // 2, 2]))
        return _paired(low | (high << WIDTH), 2 * WIDTH)


@triton.jit
def store_packed_small(values, indices, vs, codes, row, first, rows, per_row, row_bytes, WIDTH: tl.constexpr):
    """Write groups first, ... of rows row, ...: ``vs`` are N tensors of values ``[rows, groups]``, ``codes`` their places in WIDTH bits.

    ``row`` and ``first`` are int64, first a multiple of 8 / WIDTH; of ``rows`` rows each has ``per_row`` groups and ``row_bytes`` bytes.
    """
    N: tl.constexpr = len(vs)
    GROUPS: tl.constexpr = codes.shape[1]
    r = row + tl.arange(0, codes.shape[0])[:, None]
    i = tl.arange(0, GROUPS * N)[None, :]
    left = per_row - first
    v = tl.reshape(joined(vs), [codes.shape[0], GROUPS * N])
    tl.store(values + r * (per_row * N) + first * N + i, v, mask=(r < rows) & (i < left * N))
    codes = tl.where(tl.arange(0, GROUPS)[None, :] < left, codes, 0)
    i = tl.arange(0, GROUPS * WIDTH // 8)[None, :]
    start = first * WIDTH // 8
    tl.store(indices + r * row_bytes + start + i, _paired(codes, WIDTH).to(tl.uint8), mask=(r < rows) & (i < row_bytes - start))
