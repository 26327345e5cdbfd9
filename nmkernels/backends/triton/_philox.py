"""Random words in a kernel: Philox4x32-10 (Salmon et al., SC 2011), bit for bit those of the reference and of csrc/core/philox.h.

The seed tensor, int64 (seed, offset), is read where it lies, so that a captured graph replays with whatever it then holds.
"""

# ruff: noqa: RUF005 -- Triton does not compile starred expressions
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _round(c0, c1, c2, c3, k0, k1):
    """(c0, c1, c2, c3) -> (hi(B c2) ^ c1 ^ k0, lo(B c2), hi(A c0) ^ c3 ^ k1, lo(A c0))."""
    a = c0.to(tl.uint64) * 0xD2511F53
    b = c2.to(tl.uint64) * 0xCD9E8D57
    return (b >> 32).to(tl.uint32) ^ c1 ^ k0, b.to(tl.uint32), (a >> 32).to(tl.uint32) ^ c3 ^ k1, a.to(tl.uint32)


@triton.jit
def philox_block(seed, counter):
    """The four words of each int64 ``counter``: key = (seed lo, hi), counter words = (counter lo, hi, offset lo, hi). uint32."""
    key = tl.load(seed)
    offset = tl.load(seed + 1)
    c0, c1 = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    c2, c3 = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    # the key words grow by a constant a round; in 64 bits, which the cast cuts, so that nothing overflows
    high = key >> 32
    for r in tl.static_range(10):
        k0, k1 = (key + r * 0x9E3779B9).to(tl.uint32), (high + r * 0xBB67AE85).to(tl.uint32)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    return c0, c1, c2, c3


@triton.jit
def uniforms24(seed, j):
    """One 24-bit number for each group ``j`` (int64): word j & 3 of counter j >> 2, int32."""
    w0, w1, w2, w3 = philox_block(seed, j >> 2)
    word = (j & 3).to(tl.int32)
    low = tl.where(word == 0, w0, w1)
    high = tl.where(word == 2, w2, w3)
    return (tl.where(word < 2, low, high) >> 8).to(tl.int32)


@triton.jit
def uniforms24_of_four(seed, block):
    """The numbers of groups 4 block to 4 block + 3, along a new last dimension: a quarter of the work."""
    w0, w1, w2, w3 = philox_block(seed, block)
    # joined as (w0, w2), (w1, w3), so that the new dimensions count 0, 1, 2, 3
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return (tl.reshape(words, block.shape + [4]) >> 8).to(tl.int32)


@triton.jit
def pairs24(seed, j):
    """Two 24-bit numbers for each group ``j`` (the approximate method): words 0 and 1 of counter j."""
    w0, w1, _w2, _w3 = philox_block(seed, j)
    return (w0 >> 8).to(tl.int32), (w1 >> 8).to(tl.int32)
