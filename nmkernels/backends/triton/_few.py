"""y = x Wᵀ + b for 1 to 4 tokens, W compressed: bound by reading the packed bytes, so everything else is kept out of their way.

A program owns ROWS rows of W and walks along them in steps of CHUNKS x LANES x VEC stored values: VEC are the 16 bytes that a thread
reads at once, LANES neighbouring threads read along one row, and a thread reads CHUNKS times before it computes, so that enough bytes
are on their way. What a stored value costs decides: at 4.2 TB/s an H200 (132 multiprocessors at 1.75 GHz) has for a value of 2:4 in
bfloat16 15.8 instructions, 7.9 of them on integers, and 4 accesses to shared memory or to the first cache. So the element of x that a
value meets is

* not read by address: the 8 values of a thread span 16 columns and more, so that one read of 32 threads costs 8 to 32 turns of the cache;
* not chosen among registers: that takes M - 1 selections on integers for each token and value;
* read from shared memory, where the x of a step lies in float32 as [group of a thread, thread, place], LANES x M <= 32: for each of their
  values 32 threads find their elements in different banks or in the same word. One access for each token and value, for every pattern.

Counted in the machine code of sm_90 that is 6.5 instructions a value for one token and 13.9 for four, of which 4.5 are accesses to shared
memory, their bound. A pattern that does not fit (``Tile.staged``) takes the careful way, by address and with every index checked; and so
does a program again that has met an index outside its group: such a value contributes nothing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...pattern import Pattern
from ._epilogue import activate, combine
from ._few_tiles import Tile, plan
from ._groups import narrow, widen
from ._launch import cdiv, launch

FEW_TOKENS = 4
"""Up to so many tokens ``few`` takes: beyond, accesses to shared memory bound it instead of bytes."""


@triton.jit
def places(packed, BITS: tl.constexpr):
    """Index bytes ``[bytes, rows, chunks]`` as places ``[bytes * 8 / BITS, rows, chunks]``, with garbage above the lowest BITS bits."""
    PER: tl.constexpr = 8 // BITS
    shifted = packed.to(tl.int32)[:, None, :, :] >> (tl.arange(0, PER) * BITS)[None, :, None, None]
    return tl.reshape(shifted, [packed.shape[0] * PER, packed.shape[1], packed.shape[2]])


@triton.jit
def load_step(v_at, p_at, v_inside, p_inside, WHOLE: tl.constexpr):
    """Values and index bytes of a step; zeros outside."""
    if WHOLE:
        return tl.load(v_at), tl.load(p_at)
    else:
        return tl.load(v_at, mask=v_inside, other=0.0), tl.load(p_at, mask=p_inside, other=0)


@triton.jit
def columns_staged(TOKENS: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr, OWN: tl.constexpr, M: tl.constexpr):
    """Token and column of each float of x in shared memory: [token, chunk, group of a thread, thread, place].

    A chunk has GROUPS groups in each row, OWN of them in one thread.
    """
    q = tl.arange(0, TOKENS * CHUNKS * GROUPS * M)
    chunk = q // (GROUPS * M)
    thread = q // M % (GROUPS // OWN)
    own = q // (GROUPS // OWN * M) % OWN
    return chunk // CHUNKS, ((chunk % CHUNKS * GROUPS + thread * OWN) + own) * M + q % M


@triton.jit
def groups_staged(TOKENS: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr, OWN: tl.constexpr, M: tl.constexpr):
    """Where the group of each value starts there, ``[tokens, values, rows, chunks]``: as what depends on the thread, and the rest."""
    GROUPS: tl.constexpr = WIDTH // N
    group = tl.arange(0, WIDTH) // N
    token_chunk = tl.arange(0, TOKENS)[:, None, None, None] * CHUNKS + tl.arange(0, CHUNKS)[None, None, None, :]
    own = (group % OWN * (GROUPS // OWN * M))[None, :, None, None]
    return (group // OWN * M)[None, :, None, None], token_chunk * (GROUPS * M) + own


@triton.jit
def staged_products(
    x, values, indices, row, cols, kept, first, steps,
    N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr,
    VEC: tl.constexpr, AHEAD: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Sums ``[tokens, rows]`` over ``steps`` steps from value ``first``, and all index bytes met, or-ed; ``kept`` is a multiple of VEC.

    AHEAD reads a step while the one before is computed: for grids too small to hide that by themselves. WHOLE: no step passes the end.
    """
    PER: tl.constexpr = 8 // BITS
    WIDTH: tl.constexpr = LANES * VEC
    STEP: tl.constexpr = CHUNKS * WIDTH
    OWN: tl.constexpr = VEC // N if N < VEC else 1  # groups of a thread
    SPAN: tl.constexpr = STEP // N * M
    ROWS: tl.constexpr = row.shape[0]
    PADDED: tl.constexpr = 4 if TOKENS == 3 else TOKENS
    # columns come first: of the dimensions that are not contiguous Triton gives threads to the first one first, and chunks stay in a thread
    chunk = tl.arange(0, CHUNKS)[None, None, :]
    k = first + chunk * WIDTH + tl.arange(0, WIDTH)[:, None, None]
    b = first // PER + chunk * (WIDTH // PER) + tl.arange(0, WIDTH // PER)[:, None, None]
    v_at = values + row[None, :, None] * kept + k
    # a thread reads the bytes of its VEC values and no more, so that they need not change hands
    p_at = indices + tl.max_contiguous(row[None, :, None] * (kept // PER) + b, [VEC // PER, 1, 1])
    token, column = columns_staged(PADDED, CHUNKS, WIDTH // N, OWN, M)
    x_at = x + tl.max_contiguous(token * cols + first // N * M + column, 4 if M > 4 else M)
    thread_at, rest = groups_staged(PADDED, CHUNKS, WIDTH, N, OWN, M)
    sums = tl.zeros([PADDED, LANES, ROWS], tl.float32)
    met = tl.zeros([WIDTH // PER, ROWS, CHUNKS], tl.uint8)
    if AHEAD:
        v, p = load_step(v_at, p_at, k < kept, b < kept // PER, WHOLE)
    for step in range(steps):
        if AHEAD:
            v_at += STEP
            p_at += STEP // PER
            left = tl.where(step + 1 < steps, kept - (step + 1) * STEP, 0)
            v_next, p_next = load_step(v_at, p_at, k < left, b < left // PER, False)
        else:
            left = kept - step * STEP
            v, p = load_step(v_at, p_at, k < left, b < left // PER, WHOLE)
            v_at += STEP
            p_at += STEP // PER
        if WHOLE and TOKENS == PADDED:
            x_step = tl.load(x_at)
        else:
            x_step = tl.load(x_at, mask=(token < TOKENS) & (first // N * M + column < cols - step * SPAN), other=0.0)
        x_at += SPAN
        met |= p
        at = ((places(p, BITS)[None, :, :, :] & (M - 1)) | thread_at) + rest
        found = tl.gather(widen(x_step), tl.reshape(at, [PADDED * WIDTH * ROWS * CHUNKS]), 0)
        w = tl.reshape(widen(v), [1, LANES, VEC, ROWS, CHUNKS])
        sums += tl.sum(tl.sum(tl.reshape(found, [PADDED, LANES, VEC, ROWS, CHUNKS]) * w, 2), 3)
        if AHEAD:
            v, p = v_next, p_next
    return tl.sum(sums, 1), met


@triton.jit
def careful_products(
    x, values, indices, row, cols, kept, index_row, first, last,
    N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sums ``[tokens, rows]`` over the values from ``first`` to ``last``, any pattern; a value whose column does not exist adds nothing."""
    PER: tl.constexpr = 8 // BITS
    ROWS: tl.constexpr = row.shape[0]
    PADDED: tl.constexpr = 4 if TOKENS == 3 else TOKENS
    token = tl.arange(0, PADDED)[:, None, None]
    sums = tl.zeros([PADDED, WIDTH, ROWS], tl.float32)
    for k_0 in range(first, last, WIDTH):
        k = (k_0 + tl.arange(0, WIDTH))[:, None]
        b = (k_0 // PER + tl.arange(0, WIDTH // PER))[:, None]
        v = tl.load(values + row[None, :] * kept + k, mask=k < last, other=0.0)
        p = tl.load(indices + row[None, :] * index_row + b, mask=b < index_row, other=0)
        place = tl.reshape(places(p[:, :, None], BITS), [WIDTH, ROWS]) & ((1 << BITS) - 1)
        column = k // N * M + place
        there = (k < last) & (place < M) & (column < cols)
        found = tl.load(x + token * cols + column[None, :, :], mask=there[None, :, :] & (token < TOKENS), other=0.0)
        sums += tl.where(there[None, :, :], widen(found) * widen(v)[None, :, :], 0.0)
    return tl.sum(sums, 1)


@triton.jit
def few_kernel(
    x, values, indices, bias, y, rows, cols, vectors, steps, tiles,
    N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
    LANES: tl.constexpr, VEC: tl.constexpr, AHEAD: tl.constexpr, WHOLE: tl.constexpr, SPLITS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """y ``[tokens, rows]``, or with SPLITS > 1 the sums of each part of the columns, float32 ``[SPLITS, tokens, rows]``."""
    program = tl.program_id(0)
    row = (program % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    own = tl.minimum(row, rows - 1)
    kept = vectors * VEC
    STEP: tl.constexpr = CHUNKS * LANES * VEC
    first = program // tiles * (steps * STEP)
    sums, met = staged_products(x, values, indices, own, cols, kept, first, steps, N, M, BITS, TOKENS, CHUNKS, LANES, VEC, AHEAD, WHOLE)
    if M < (1 << BITS):
        spare = places(met, BITS) & ((1 << BITS) - M)
        if tl.max(tl.reshape(spare, [STEP * ROWS]), 0) > 0:
            index_row = kept // (8 // BITS)  # in small tiles, so that this rare way takes no registers from the common one
            last = tl.minimum(first + steps * STEP, kept)
            sums = careful_products(x, values, indices, own, cols, kept, index_row, first, last, N, M, BITS, TOKENS, 8)
    store_sums(sums, bias, y, row, program // tiles, rows, TOKENS, SPLITS, ACTIVATION)


@triton.jit
def few_careful_kernel(
    x, values, indices, bias, y, rows, cols, kept, index_row, part, tiles,
    N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    SPLITS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """The same for every pattern and size; a program adds up ``part`` values of each of its rows, a multiple of WIDTH."""
    program = tl.program_id(0)
    row = (program % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = program // tiles * part
    last = tl.minimum(first + part, kept)
    own = tl.minimum(row, rows - 1)
    sums = careful_products(x, values, indices, own, cols, kept, index_row, first, last, N, M, BITS, TOKENS, WIDTH)
    store_sums(sums, bias, y, row, program // tiles, rows, TOKENS, SPLITS, ACTIVATION)


@triton.jit
def store_sums(sums, bias, y, row, split, rows, TOKENS: tl.constexpr, SPLITS: tl.constexpr, ACTIVATION: tl.constexpr):
    """The end of both kernels: sums ``[tokens, rows]`` with bias and activation, or as they are for ``combine_kernel``."""
    token = tl.arange(0, sums.shape[0])[:, None]
    inside = (token < TOKENS) & (row < rows)[None, :]
    if SPLITS > 1:
        y += split.to(tl.int64) * TOKENS * rows
    else:
        if bias is not None:
            sums += widen(tl.load(bias + row, mask=row < rows, other=0.0))[None, :]
        sums = activate(sums, ACTIVATION)
    tl.store(y + token * rows + row[None, :], narrow(sums, y.dtype.element_ty), mask=inside)


class Call(NamedTuple):
    """What a launch takes besides tensors."""

    kernel: Any
    programs: int
    numbers: tuple[int, ...]
    warps: int
    constexprs: dict[str, Any]
    splits: int


@lru_cache(maxsize=4096)
def _call(size: int, n: int, m: int, rows: int, cols: int, tokens: int, activation: str, tile: Tile | None) -> Call:
    t, p, vec = tile or plan(size, n, m, rows, cols, tokens), Pattern(n, m), 16 // size
    kept, step, tiles, split = p.kept(cols), t.chunks * t.lanes * vec, cdiv(rows, t.rows), t.splits > 1
    consts: dict[str, Any] = {"N": n, "M": m, "BITS": p.index_bits, "TOKENS": tokens, "ROWS": t.rows}
    kernel: Any
    numbers: tuple[int, ...]
    if t.staged:
        kernel, numbers = few_kernel, (rows, cols, kept // vec, t.steps, tiles)
        consts |= {"CHUNKS": t.chunks, "LANES": t.lanes, "VEC": vec, "AHEAD": t.ahead, "WHOLE": kept == t.splits * t.steps * step}
    else:
        kernel, numbers = few_careful_kernel, (rows, cols, kept, p.index_bytes(cols), t.steps * step, tiles)
        consts["WIDTH"] = t.lanes * vec
    consts |= {"SPLITS": t.splits, "ACTIVATION": "" if split else activation, "enable_fp_fusion": True}
    return Call(kernel, tiles * t.splits, numbers, t.warps, consts, t.splits)


def few(
    x: Tensor,
    values: Tensor,
    indices: Tensor,
    n: int,
    m: int,
    cols: int,
    bias: Tensor | None,
    activation: str,
    y: Tensor,
    tile: Tile | None = None,
) -> None:
    """Fill y ``[tokens, rows]`` with activation(x Wᵀ + bias), x ``[tokens, cols]`` of 1 to 4 tokens; all of them contiguous.

    Args:
        values, indices: W ``(rows, cols)`` packed; bias: ``(rows,)`` or None, the dtype of x; activation: of ``_epilogue.ACTIVATIONS``.
        tile: instead of the one that ``plan`` chooses.
    """
    rows = values.shape[0]
    tokens = y.numel() // rows
    c = _call(x.element_size(), n, m, rows, cols, tokens, activation, tile)
    if c.splits == 1:
        launch(c.kernel, c.programs, (x, values, indices, bias, y, *c.numbers), c.warps, **c.constexprs)
        return
    parts = x.new_empty(c.splits, tokens, rows, dtype=torch.float32)
    launch(c.kernel, c.programs, (x, values, indices, None, parts, *c.numbers), c.warps, **c.constexprs)
    combine(parts, bias, y, rows, activation)
