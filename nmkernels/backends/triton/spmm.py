"""GEMM kernels with a compressed operand E: E B (fprop and wgrad), G E (dgrad), and fprop of few tokens.

Only packed values and index bytes of E are read from memory. ``spmm_kernel`` and ``spmm_transposed_kernel`` expand 16-bit values tile by
tile in registers and multiply on tensor cores; ``few_kernel`` processes single values. Sums are float32; bias and activation are applied to
the sum, and the result is rounded once.

With steps, the values of ``few_kernel`` and ``spmm_kernel`` are integers: int8, or uint8 with two of 4 bits. ``few_kernel`` multiplies
integer · step; ``spmm_kernel`` multiplies integers, which are exact in 16 bits, and scales the sums by the steps.

The expanded tile is the right operand of every GEMM. On Hopper, a wgmma with its left operand in registers reads them asynchronously, and
Triton leaves it in flight while the next step overwrites these registers, which is a race.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .groups import INTERPRETED, narrow, widen


@triton.jit
def activate(y, ACTIVATION: tl.constexpr):
    """The activation of float32 ``y``: none, GELU (erf), SiLU or squared ReLU; NaN and inf give the same as torch."""
    tl.static_assert(ACTIVATION == "" or ACTIVATION == "gelu" or ACTIVATION == "silu" or ACTIVATION == "relu2")
    if ACTIVATION == "gelu":
        return 0.5 * y * (1.0 + tl.erf(y * 0.70710678118654752))
    elif ACTIVATION == "silu":
        return y / (1.0 + tl.exp(-y))
    elif ACTIVATION == "relu2":
        positive = tl.where(y <= 0.0, 0.0, y)  # tl.maximum would lose NaN
        return positive * positive
    else:
        return y


@triton.jit
def combine_kernel(parts, bias, y, count, width, SPLITS: tl.constexpr, ACTIVATION: tl.constexpr, TILE: tl.constexpr):
    """y = activation(bias + the sum of ``parts`` ``[SPLITS, count]`` in order); bias has one number per column of ``width``."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < count
    sums = tl.load(parts + at, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        sums += tl.load(parts + split * tl.cast(count, tl.int64) + at, mask=inside, other=0.0)
    if bias is not None:
        sums += widen(tl.load(bias + at % width, mask=inside, other=0.0))
    tl.store(y + at, narrow(activate(sums, ACTIVATION), y.dtype.element_ty), mask=inside)


@triton.jit
def load_integers(values, step, row, first, stored, steps, runs, WIDTH: tl.constexpr, RUN: tl.constexpr):
    """Values first, first + 1, ... of each row as integer · step, float32 ``[WIDTH, rows]``; any number past the end.

    A row has ``stored`` bytes. ``runs`` runs of RUN values share a step; RUN divides WIDTH, and WIDTH divides ``first``.
    """
    rows: tl.constexpr = row.shape[0]
    if values.dtype.element_ty == tl.uint8:
        at = (first // 2 + tl.arange(0, WIDTH // 2))[:, None]
        pairs = tl.load(values + row[None, :] * stored + at, mask=at < stored, other=0).to(tl.int32)
        # shifts of int32 extend the sign
        shifted = pairs[:, None, :] << (28 - 4 * tl.arange(0, 2))[None, :, None]
        integers = tl.reshape(shifted, [WIDTH, rows]) >> 28
    else:
        at = (first + tl.arange(0, WIDTH))[:, None]
        integers = tl.load(values + row[None, :] * stored + at, mask=at < stored, other=0)
    at = ((first // RUN + tl.arange(0, WIDTH // RUN)) // runs)[:, None]
    s = widen(tl.load(step + row[None, :] * steps + at, mask=at < steps, other=0.0))
    s = tl.reshape(tl.broadcast_to(s[:, None, :], [WIDTH // RUN, RUN, rows]), [WIDTH, rows])
    return integers.to(tl.float32) * s


@triton.jit
def few_kernel(
    x, values, indices, step, bias, y, rows, cols, kept, stored, index_row, steps, runs,
    N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    RUN: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """y ``[tokens, rows]`` = activation(x Eᵀ + bias) for a few tokens and any pattern: bound by reading E.

    Reads WIDTH values at a time from each of ROWS rows. A value whose column does not exist adds nothing.
    """
    PER: tl.constexpr = 8 // BITS
    PADDED: tl.constexpr = 4 if TOKENS == 3 else TOKENS
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    safe_row = tl.minimum(row, rows - 1)
    token = tl.arange(0, PADDED)[:, None, None]
    sums = tl.zeros([PADDED, WIDTH, ROWS], tl.float32)
    for first in range(0, kept, WIDTH):
        k = (first + tl.arange(0, WIDTH))[:, None]
        b = (first // PER + tl.arange(0, WIDTH // PER))[:, None]
        if step is None:
            v = widen(tl.load(values + safe_row[None, :] * kept + k, mask=k < kept, other=0.0))
        else:
            v = load_integers(values, step, safe_row, first, stored, steps, runs, WIDTH, RUN)
        p = tl.load(indices + safe_row[None, :] * index_row + b, mask=b < index_row, other=0)
        shifted = p.to(tl.int32)[:, None, :] >> (tl.arange(0, PER) * BITS)[None, :, None]
        index = tl.reshape(shifted, [WIDTH, ROWS]) & ((1 << BITS) - 1)
        column = k // N * M + index
        there = (k < kept) & (index < M) & (column < cols)
        inputs = tl.load(x + token * cols + column[None, :, :], mask=there[None, :, :] & (token < TOKENS), other=0.0)
        sums += tl.where(there[None, :, :], widen(inputs) * v[None, :, :], 0.0)
    result = tl.sum(sums, 1)
    if bias is not None:
        result += widen(tl.load(bias + row, mask=row < rows, other=0.0))[None, :]
    token = tl.arange(0, PADDED)[:, None]
    inside = (token < TOKENS) & (row < rows)[None, :]
    tl.store(y + token * rows + row[None, :], narrow(activate(result, ACTIVATION), y.dtype.element_ty), mask=inside)


@triton.jit
def word_pointers(
    values, indices, row, group, groups, index_row,
    N: tl.constexpr, BITS: tl.constexpr, VALUE: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Pointers to the words of values ``[rows, GROUPS]`` and of indices, starting at group ``group``, a multiple of GROUPS.

    The N values of a group, of VALUE bits each, are one word, or half of one if they have 4 bits together; the indices of several groups
    another. EVEN is a power of two that divides ``groups``, which tells the compiler how wide it may read.
    """
    SIZE: tl.constexpr = N * VALUE
    WORD: tl.constexpr = tl.uint8 if SIZE <= 8 else tl.uint16 if SIZE == 16 else tl.uint32 if SIZE == 32 else tl.uint64
    IN_WORD: tl.constexpr = 8 // SIZE if SIZE < 8 else 1
    FACTOR: tl.constexpr = (EVEN + IN_WORD - 1) // IN_WORD
    PER: tl.constexpr = 32 // (BITS * N)
    w = values.to(tl.pointer_type(WORD), bitcast=True) + row[:, None] * (tl.cdiv(groups, IN_WORD) // FACTOR * FACTOR)
    w += (group // IN_WORD + tl.arange(0, GROUPS // IN_WORD))[None, :]
    i = indices.to(tl.pointer_type(tl.uint32), bitcast=True)
    return w, i + row[:, None] * (index_row // 4) + (group // PER + tl.arange(0, GROUPS // PER))[None, :]


@triton.jit
def load_words(w, i, group, groups, index_row, inside, N: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, WHOLE: tl.constexpr):
    """Load words of values and indices; zeros past the last group, and in rows that are not ``inside``."""
    PER: tl.constexpr = 32 // (BITS * N)
    IN_WORD: tl.constexpr = GROUPS // w.shape[1]
    if WHOLE:
        v, p = tl.load(w), tl.load(i)
    else:
        left = tl.cdiv(groups - group, IN_WORD)
        v = tl.load(w, mask=(tl.arange(0, GROUPS // IN_WORD) < left)[None, :] & inside[:, None], other=0)
        words = index_row // 4 - group // PER
        p = tl.load(i, mask=(tl.arange(0, GROUPS // PER) < words)[None, :] & inside[:, None], other=0)
    if IN_WORD == 2:
        v = tl.reshape(v.to(tl.int32)[:, :, None] >> (4 * tl.arange(0, 2))[None, None, :], [v.shape[0], GROUPS])
    return v, p


@triton.jit
def spread_words(words, packed, N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, VALUE: tl.constexpr, dtype: tl.constexpr):
    """Expand values ``[rows, groups]``, N per integer, and indices ``[rows, words]``, 32 bits each, to dense bits ``[rows, groups * M]``.

    A value is shifted to its place inside 64 bits, which are four columns. Values with a corrupt index >= M are left out. Values of less
    than 16 bits are integers and become numbers of ``dtype``.
    """
    rows: tl.constexpr = words.shape[0]
    groups: tl.constexpr = words.shape[1]
    per: tl.constexpr = groups // packed.shape[1]
    shift = (tl.arange(0, per) * (BITS * N)).to(tl.uint32)
    bits = packed[:, :, None] >> shift[None, None, :]
    part = tl.arange(0, M // 4)[None, None, :]
    bits = tl.reshape(bits, [rows, groups, 1])
    words = tl.reshape(words, [rows, groups, 1])
    dense = tl.zeros([rows, groups, M // 4], tl.uint64)
    for j in tl.static_range(N):
        value = words
        if VALUE < 16:
            # shifts of int32 extend the sign
            value = (words.to(tl.int32) << (32 - VALUE * (j + 1))) >> (32 - VALUE)
            value = value.to(tl.float32).to(dtype).to(tl.uint16, bitcast=True)
        else:
            if j > 0:
                value = words >> (16 * j)
            if N > 1 and j < N - 1:
                value = value & 0xFFFF
        at = bits
        if j > 0:
            at = bits >> (BITS * j)
        placed = value.to(tl.uint32).to(tl.uint64) << ((at & 3) << 4).to(tl.uint64)
        if M > 4:
            placed = tl.where(((at & ((1 << BITS) - 1)) >> 2) == part, placed, 0)
        dense = dense | placed
    low = dense.to(tl.uint32)
    high = (dense >> 32).to(tl.uint32)
    even = tl.join(low.to(tl.uint16), high.to(tl.uint16))
    odd = tl.join((low >> 16).to(tl.uint16), (high >> 16).to(tl.uint16))
    return tl.reshape(tl.join(even, odd), [rows, groups * M])


@triton.jit
def _multiply(a, b, sums):
    """sums + a b; the interpreter multiplies in float32, because its bfloat16 arithmetic is not reliable."""
    if INTERPRETED:
        return tl.dot(widen(a), widen(b), sums, input_precision="ieee")
    else:
        return tl.dot(a, b, sums)


@triton.jit
def _tile_of(program, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Row and column of a program's tile: bands of 8 rows of tiles, so that neighbouring programs share cached data."""
    down = tl.cdiv(rows, ROWS)
    across = tl.cdiv(cols, COLS)
    band = program // (8 * across)
    height = tl.minimum(down - band * 8, 8)
    inside = program % (8 * across)
    return band * 8 + inside % height, inside // height


@triton.jit
def spmm_kernel(
    values, indices, step, b, bias, c, rows, cols, width, groups, index_row, b_k, b_c, c_r, c_c, steps, run,
    N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    GROUPS: tl.constexpr, SPLITS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """c ``[rows, width]`` = activation(E b + bias), E ``[rows, cols]`` compressed, b ``[cols, width]``; bias has one number per row.

    With SPLITS > 1, c is float32 ``[SPLITS, rows * width]``: the sums over parts of cols, without bias and activation. ``run`` tiles of
    columns share one of a row's ``steps`` steps.
    """
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(width, COLS)
    split = tl.program_id(0) // tiles
    tile_row, tile_col = _tile_of(tl.program_id(0) % tiles, rows, width, ROWS, COLS)
    row = tile_row * ROWS + tl.arange(0, ROWS)
    col = tile_col * COLS + tl.arange(0, COLS)
    # past the end the first rows and columns are read again, but not stored
    e_row, b_col = (row % rows).to(tl.int64), (col % width).to(tl.int64)
    inside = row < rows
    blocks = tl.cdiv(groups, GROUPS)
    share = tl.cdiv(blocks, SPLITS)
    first, last = split * share, tl.minimum((split + 1) * share, blocks)
    k = tl.arange(0, GROUPS * M)
    b_at = b + (first.to(tl.int64) * (GROUPS * M) + k)[:, None] * b_k + b_col[None, :] * b_c
    w_at, i_at = word_pointers(values, indices, e_row, first * GROUPS, groups, index_row, N, BITS, VALUE, GROUPS, EVEN)
    sums = tl.zeros([COLS, ROWS], tl.float32)
    for block in range(first, last):
        w, i = load_words(w_at, i_at, block * GROUPS, groups, index_row, inside, N, BITS, GROUPS, WHOLE)
        e = spread_words(w, i, N, M, BITS, VALUE, b.dtype.element_ty).to(b.dtype.element_ty, bitcast=True)
        w_at += w_at.shape[1]
        i_at += GROUPS * N * BITS // 32
        if WHOLE:
            x = tl.load(b_at)
        else:
            real = k < cols - block * (GROUPS * M)
            x = tl.load(b_at, mask=real[:, None], other=0.0)
            e = tl.where(real[None, :], e, 0.0)  # a partial last group may store an inf past the end
        if step is None:
            sums = _multiply(tl.trans(x), tl.trans(e), sums)
        else:
            part = _multiply(tl.trans(x), tl.trans(e), tl.zeros([COLS, ROWS], tl.float32))
            sums += part * widen(tl.load(step + e_row * steps + block // run))[None, :]
        b_at += tl.cast(GROUPS * M, tl.int64) * b_k
    in_bounds = tl.trans(inside[:, None] & (col < width)[None, :])
    c_at = tl.trans(c + row.to(tl.int64)[:, None] * c_r + col.to(tl.int64)[None, :] * c_c)
    if SPLITS > 1:
        tl.store(c_at + split.to(tl.int64) * rows * width, sums, mask=in_bounds)
    else:
        if bias is not None:
            sums += widen(tl.load(bias + e_row))[None, :]
        tl.store(c_at, narrow(activate(sums, ACTIVATION), c.dtype.element_ty), mask=in_bounds)


@triton.jit
def spmm_transposed_kernel(
    values, indices, g, c, rows, cols, tokens, groups, index_row, g_t, g_r,
    N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, GROUPS: tl.constexpr,
    WHOLE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """c ``[tokens, cols]`` = g E, E ``[rows, cols]`` compressed, g ``[tokens, rows]``: tiles of COLS tokens, ROWS rows of E at a time."""
    tile_t, tile_k = _tile_of(tl.program_id(0), tokens, groups, COLS, GROUPS)
    token = tile_t * COLS + tl.arange(0, COLS)
    g_token = (token % tokens).to(tl.int64)
    row = tl.arange(0, ROWS)
    group = tile_k * GROUPS
    g_at = g + g_token[:, None] * g_t + row.to(tl.int64)[None, :] * g_r
    w_at, i_at = word_pointers(values, indices, row.to(tl.int64), group, groups, index_row, N, BITS, 16, GROUPS, EVEN)
    sums = tl.zeros([COLS, GROUPS * M], tl.float32)
    for block in range(tl.cdiv(rows, ROWS)):
        inside = row < rows - block * ROWS
        w, i = load_words(w_at, i_at, group, groups, index_row, inside, N, BITS, GROUPS, WHOLE)
        e = spread_words(w, i, N, M, BITS, 16, g.dtype.element_ty).to(g.dtype.element_ty, bitcast=True)
        w_at += tl.cast(ROWS, tl.int64) * groups
        i_at += tl.cast(ROWS, tl.int64) * (index_row // 4)
        if WHOLE:
            x = tl.load(g_at)
        else:
            x = tl.load(g_at, mask=inside[None, :], other=0.0)
        sums = _multiply(x, e, sums)
        g_at += tl.cast(ROWS, tl.int64) * g_r
    k = group.to(tl.int64) * M + tl.arange(0, GROUPS * M)
    in_bounds = (token < tokens)[:, None] & (k < cols)[None, :]
    tl.store(c + token.to(tl.int64)[:, None] * cols + k[None, :], narrow(sums, c.dtype.element_ty), mask=in_bounds)
