"""The scale of soft_threshold: two sums over a tensor in float64, in an order that only its size decides.

The first kernel leaves two partial sums of each 8192 elements, the second adds those and divides: no atomics, nothing for the host to wait
for. The reference adds 4096 elements at a time and from left to right, so that the results agree to rounding in float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._groups import load_groups, widen
from ._launch import cdiv, launch, next_power_of_2
from .groups import ELEMENTS, PADDED_ELEMENTS, shrink

TILES = 4
"""Tiles of one program: few enough that a weight of 4096 x 4096 still fills a GPU, and 1/4 of the partial sums to add."""

BLOCK = 1024
"""Partial sums that the second kernel adds at once."""


@triton.jit
def scale_sums_kernel(
    w, sums, groups, programs, N: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr, TILES: tl.constexpr
):
    """sums[0] = <w, S> and sums[1] = ||S||² of this program's groups, S = soft_threshold(w)."""
    program = tl.program_id(0)
    first = program.to(tl.int64) * (TILE * TILES)
    dot = tl.zeros([TILE], tl.float64)
    square = tl.zeros([TILE], tl.float64)
    for _ in range(TILES):
        x = load_groups(w, first, groups, M, TILE, PADDED)
        s = widen(shrink(x, N, M)).to(tl.float64)
        dot += tl.sum(widen(x).to(tl.float64) * s, 1)
        square += tl.sum(s * s, 1)
        first += TILE
    tl.store(sums + program, tl.sum(dot, 0))
    tl.store(sums + programs + program, tl.sum(square, 0))


@triton.jit
def scale_kernel(sums, scale, programs, BLOCK: tl.constexpr):
    """scale = Σ sums[0] / Σ sums[1], 0 where the latter is 0."""
    dot = tl.zeros([BLOCK], tl.float64)
    square = tl.zeros([BLOCK], tl.float64)
    for first in range(0, programs, BLOCK):
        program = first + tl.arange(0, BLOCK)
        dot += tl.load(sums + program, mask=program < programs, other=0.0)
        square += tl.load(sums + programs + program, mask=program < programs, other=0.0)
    total = tl.sum(square, 0)
    tl.store(scale, tl.where(total == 0, 0.0, tl.sum(dot, 0) / total).to(tl.float32))


def soft_threshold_scale(w: Tensor, n: int, m: int, out: Tensor | None = None) -> Tensor:
    """``nm_soft_threshold_scale``."""
    w = w.resolve_neg().contiguous()
    scale = w.new_empty((), dtype=torch.float32) if out is None else out
    groups, padded = w.numel() // m, next_power_of_2(m)
    tile = max(1, (ELEMENTS if padded == m else PADDED_ELEMENTS) // padded)
    programs = cdiv(groups, tile * TILES)
    sums = w.new_empty(2, programs, dtype=torch.float64)
    launch(scale_sums_kernel, programs, (w, sums, groups, programs), N=n, M=m, TILE=tile, PADDED=padded, TILES=TILES)
    launch(scale_kernel, 1, (sums, scale, programs), BLOCK=BLOCK)
    return scale
