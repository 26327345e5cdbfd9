"""transposable_mask for 2:4: the first best of the 90 patterns of each 4 x 4 tile.

With r0 ... r3 the sums of each row's six pairs, a pattern's score is (r0[i] + r1[j]) + (r2[k] + r3[q]), every sum rounded. NaN counts as
infinity.
"""

from __future__ import annotations

from itertools import combinations, product

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..shared import contiguous
from .groups import widen
from .launch import cdiv, launch, next_power_of_2

BYTES = 4 * 32 * 16
"""Bytes of one row of a program's tiles: 4 warps reading 16 bytes per thread, one float32 or two 16-bit tiles, about 100 registers."""

_PAIRS = list(combinations(range(4), 2))
_PATTERNS = [rows for rows in product(range(6), repeat=4) if all(sum(c in _PAIRS[i] for i in rows) == 2 for c in range(4))]
PATTERNS = tl.constexpr(tuple(i for rows in _PATTERNS for i in rows))
"""The pair ids of the four rows of each pattern, in lexicographic order."""
MASKS = tl.constexpr(tuple(sum(1 << 4 * row + c for row, i in enumerate(rows) for c in _PAIRS[i]) for rows in _PATTERNS))
"""The same as 16-bit masks, row by row."""


@triton.jit
def _row_sums(w, offset, valid, TILES: tl.constexpr):
    """The pair sums of one row of ``TILES`` tiles."""
    x = widen(tl.load(w + offset, mask=valid, other=0.0))
    x = tl.where(x == x, tl.abs(x), float("inf"))
    even, odd = tl.split(tl.reshape(x, [TILES, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a + b, a + c, a + d, b + c, b + d, c + d


@triton.jit
def transposable_mask_kernel(w, out, bands, per_band, across, BANDS: tl.constexpr, TILES: tl.constexpr):
    """out = the masks of ``BANDS`` bands of four rows, ``TILES`` tiles of each; a row of a tile is one int32 of ``out``.

    There are ``bands`` bands of ``per_band`` tiles, and ``across`` programs per band.
    """
    program = tl.program_id(0)
    band = (program // across).to(tl.int64) * BANDS
    tile = (program % across).to(tl.int64) * TILES
    w += band * 16 * per_band + tile * 4
    out += band * 4 * per_band + tile
    line = tl.arange(0, BANDS * TILES * 4)
    band_of, c = line // (TILES * 4), line % (TILES * 4)
    valid = (band_of < bands - band) & (c < (per_band - tile) * 4)
    stride = tl.cast(per_band, tl.int64) * 4
    at = band_of * (16 * per_band) + c
    r0 = _row_sums(w, at, valid, BANDS * TILES)
    r1 = _row_sums(w + stride, at, valid, BANDS * TILES)
    r2 = _row_sums(w + 2 * stride, at, valid, BANDS * TILES)
    r3 = _row_sums(w + 3 * stride, at, valid, BANDS * TILES)
    best = tl.full(r0[0].shape, -1.0, tl.float32)
    mask = tl.zeros(r0[0].shape, tl.int32)  # the 16 bits of the first best pattern
    for i in tl.static_range(90):
        upper = r0[PATTERNS[4 * i]] + r1[PATTERNS[4 * i + 1]]
        score = upper + (r2[PATTERNS[4 * i + 2]] + r3[PATTERNS[4 * i + 3]])
        mask = tl.where(score > best, MASKS[i], mask)
        best = tl.maximum(score, best)
    line = tl.arange(0, BANDS * TILES)
    band_of, c = line // TILES, line % TILES
    valid = (band_of < bands - band) & (c < per_band - tile)
    at = band_of * (4 * per_band) + c
    for row in tl.static_range(4):
        # bit c of a row becomes byte c
        tl.store(out + row * (stride // 4) + at, ((mask >> 4 * row & 15) * 0x00204081) & 0x01010101, mask=valid)


def transposable_mask(w: Tensor, n: int, m: int, out: Tensor | None = None) -> Tensor:
    w = contiguous(w)
    result = torch.empty_like(w, dtype=torch.bool) if out is None else out
    if not w.numel():
        return result
    # a row of a tile is written as one integer, for which a caller's out may be misaligned
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
