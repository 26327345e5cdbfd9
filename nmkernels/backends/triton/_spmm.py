"""Products with a compressed operand E, expanded tile by tile in registers: E B, which is fprop and wgrad, and G E, which is dgrad.

Only packed values and index bytes of E cross memory. Each is a matrix product on tensor cores with float32 accumulation; bias and
activation are applied in float32, and the result is rounded once.

On Hopper, a wgmma that takes its left operand from registers reads them while the thread goes on. Where its result is only added to, Triton
leaves such wgmma in flight into the next step, which writes these registers again: a race. The expanded tile is therefore the
right operand, in shared memory, or the wgmma is waited for in its own step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._epilogue import activate
from ._expand import load_words, spread_pieces, spread_words, word_pointers
from ._groups import INTERPRETED, narrow, widen


@triton.jit
def _multiply(a, b, sums, PRECISION: tl.constexpr):
    """sums + a b; the interpreter multiplies in float32, because its bfloat16 arithmetic is not to be trusted."""
    if INTERPRETED:
        return tl.dot(widen(a), widen(b), sums, input_precision="ieee")
    else:
        return tl.dot(a, b, sums, input_precision=PRECISION)


@triton.jit
def _add(e, x, sums, running, WGMMA: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):
    """sums + e x, TRANSPOSED sums + xᵀ eᵀ. ``running`` is true, which the compiler does not know."""
    if TRANSPOSED:
        sums = _multiply(tl.trans(x), tl.trans(e), sums, PRECISION)
    else:
        sums = _multiply(e, x, sums, PRECISION)
        if WGMMA:
            sums = tl.where(running, sums, 0.0)  # what reads the sums has Triton wait for them
    return sums


@triton.jit
def _tile_of(program, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Row and column of a program's tile: bands of 8 tiles of rows, so that what neighbours read stays in the cache."""
    down = tl.cdiv(rows, ROWS)
    across = tl.cdiv(cols, COLS)
    band = program // (8 * across)
    height = tl.minimum(down - band * 8, 8)
    inside = program % (8 * across)
    return band * 8 + inside % height, inside // height


@triton.jit
def spmm_kernel(
    values, indices, b, bias, c, rows, cols, width, groups, index_row, b_k, b_c, c_r, c_c,
    N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, GROUPS: tl.constexpr,
    PADDED: tl.constexpr, SPLITS: tl.constexpr, WORDS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr, WGMMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """c ``[rows, width]`` = activation(E b + bias), E ``[rows, cols]`` compressed, b ``[cols, width]``; bias is one number a row.

    With SPLITS > 1, c is float32 ``[SPLITS, rows * width]``: the sums over parts of cols, without bias and activation.
    WGMMA: the tensor cores are Hopper's. Tiles as wide as its instruction is high, 64, are then multiplied transposed, bᵀ Eᵀ.
    """
    TRANSPOSED: tl.constexpr = WGMMA and COLS >= 64
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(width, COLS)
    split = tl.program_id(0) // tiles
    tile_row, tile_col = _tile_of(tl.program_id(0) % tiles, rows, width, ROWS, COLS)
    row = tile_row * ROWS + tl.arange(0, ROWS)
    col = tile_col * COLS + tl.arange(0, COLS)
    # past the end the first rows and columns are read again, and not stored
    e_row, b_col = (row % rows).to(tl.int64), (col % width).to(tl.int64)
    inside = row < rows
    blocks = tl.cdiv(groups, GROUPS)
    share = tl.cdiv(blocks, SPLITS)
    first, last = split * share, tl.minimum((split + 1) * share, blocks)
    line = tl.arange(0, GROUPS * PADDED)
    k = line if PADDED == M else line // PADDED * M + line % PADDED
    b_at = b + (first.to(tl.int64) * (GROUPS * M) + k)[:, None] * b_k + b_col[None, :] * b_c
    if WORDS:
        w_at, i_at = word_pointers(values, indices, e_row, first * GROUPS, groups, index_row, N, BITS, GROUPS, EVEN)
    sums = tl.zeros([COLS, ROWS] if TRANSPOSED else [ROWS, COLS], tl.float32)
    for block in range(first, last):
        if WORDS:
            w, i = load_words(w_at, i_at, block * GROUPS, groups, index_row, inside, N, M, BITS, GROUPS, WHOLE)
            e = spread_words(w, i, N, M, BITS, values.dtype.element_ty.primitive_bitwidth).to(values.dtype.element_ty, bitcast=True)
            w_at += GROUPS
            i_at += GROUPS * N * BITS // 32
        else:
            e = spread_pieces(values, indices, e_row, inside, block * GROUPS, groups, index_row, N, M, BITS, GROUPS, PADDED)
        if WHOLE and PADDED == M:
            x = tl.load(b_at)
        else:
            real = (k < cols - block * (GROUPS * M)) & (line % PADDED < M)
            x = tl.load(b_at, mask=real[:, None], other=0.0)
            e = tl.where(real[None, :], e, 0.0)  # a partial last group may store an inf past the end
        sums = _add(e, x, sums, first < last, WGMMA, TRANSPOSED, PRECISION)
        b_at += tl.cast(GROUPS * M, tl.int64) * b_k
    kept = inside[:, None] & (col < width)[None, :]
    c_at = c + row.to(tl.int64)[:, None] * c_r + col.to(tl.int64)[None, :] * c_c
    if TRANSPOSED:
        kept, c_at = tl.trans(kept), tl.trans(c_at)
    if SPLITS > 1:
        tl.store(c_at + split.to(tl.int64) * rows * width, sums, mask=kept)
    else:
        if bias is not None:
            sums += tl.expand_dims(widen(tl.load(bias + e_row)), 0 if TRANSPOSED else 1)
        tl.store(c_at, narrow(activate(sums, ACTIVATION), c.dtype.element_ty), mask=kept)


@triton.jit
def spmm_transposed_kernel(
    values, indices, g, c, rows, cols, tokens, groups, index_row, g_t, g_r,
    N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, GROUPS: tl.constexpr,
    PADDED: tl.constexpr, WORDS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """c ``[tokens, cols]`` = g E, E ``[rows, cols]`` compressed, g ``[tokens, rows]``: tiles of COLS tokens, ROWS rows of E at a time."""
    tile_t, tile_k = _tile_of(tl.program_id(0), tokens, groups, COLS, GROUPS)
    token = tile_t * COLS + tl.arange(0, COLS)
    g_token = (token % tokens).to(tl.int64)
    row = tl.arange(0, ROWS)
    group = tile_k * GROUPS
    g_at = g + g_token[:, None] * g_t + row.to(tl.int64)[None, :] * g_r
    if WORDS:
        w_at, i_at = word_pointers(values, indices, row.to(tl.int64), group, groups, index_row, N, BITS, GROUPS, EVEN)
    sums = tl.zeros([COLS, GROUPS * PADDED], tl.float32)
    for block in range(tl.cdiv(rows, ROWS)):
        inside = row < rows - block * ROWS
        if WORDS:
            w, i = load_words(w_at, i_at, group, groups, index_row, inside, N, M, BITS, GROUPS, WHOLE)
            e = spread_words(w, i, N, M, BITS, values.dtype.element_ty.primitive_bitwidth).to(values.dtype.element_ty, bitcast=True)
            w_at += tl.cast(ROWS, tl.int64) * groups
            i_at += tl.cast(ROWS, tl.int64) * (index_row // 4)
        else:
            e = spread_pieces(
                values, indices, (block * ROWS + row).to(tl.int64), inside, group, groups, index_row, N, M, BITS, GROUPS, PADDED
            )
        if WHOLE:
            x = tl.load(g_at)
        else:
            x = tl.load(g_at, mask=inside[None, :], other=0.0)
        sums = _multiply(x, e, sums, PRECISION)
        g_at += tl.cast(ROWS, tl.int64) * g_r
    line = tl.arange(0, GROUPS * PADDED)
    k = group.to(tl.int64) * M + (line if PADDED == M else line // PADDED * M + line % PADDED)
    kept = (token < tokens)[:, None] & ((k < cols) & (line % PADDED < M))[None, :]
    tl.store(c + token.to(tl.int64)[:, None] * cols + k[None, :], narrow(sums, c.dtype.element_ty), mask=kept)
