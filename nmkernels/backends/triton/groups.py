"""mask, prune and soft_threshold: one program per tile of groups, each element read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._groups import kept, key_value, load_groups, narrow, nth_largest, ranked_keys, store_groups, widen
from ._launch import cdiv, launch, next_power_of_2

ELEMENTS = 2048
"""Elements of a tile: with 4 warps two or four 16-byte reads a thread, which keeps enough of them in flight."""

PADDED_ELEMENTS = 1024
"""The same where M is padded: each element then has an address of its own, and 16 of them do not fit in registers (3:5, sm_90)."""


@triton.jit
def mask_kernel(w, out, groups, N: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr):
    """out = mask(w), one byte an element."""
    first = tl.program_id(0).to(tl.int64) * TILE
    x = load_groups(w, first, groups, M, TILE, PADDED)
    store_groups(out, kept(x, N, M).to(tl.int8), first, groups, M)


@triton.jit
def prune_kernel(w, out, groups, N: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr):
    """out = w where mask(w), else +0.0."""
    first = tl.program_id(0).to(tl.int64) * TILE
    x = load_groups(w, first, groups, M, TILE, PADDED)
    store_groups(out, tl.where(kept(x, N, M), x, 0.0), first, groups, M)


@triton.jit
def shrink(x, N: tl.constexpr, M: tl.constexpr):
    """sign(w)·max(|w| − t, 0) of a tile, rounded to its dtype; t is the magnitude of rank N + 1, 0 for N = M."""
    wide = widen(x)
    d = tl.abs(wide)
    if N < M:
        d = d - key_value((nth_largest(ranked_keys(x, M), N + 1) >> 8).to(tl.int32), x.dtype)
    signed = (d.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | (wide.to(tl.int32, bitcast=True) & -0x80000000)
    return narrow(tl.where(d <= 0.0, 0.0, signed.to(tl.float32, bitcast=True)), x.dtype)


@triton.jit
def soft_threshold_kernel(w, out, groups, N: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr):
    """out = soft_threshold(w)."""
    first = tl.program_id(0).to(tl.int64) * TILE
    x = load_groups(w, first, groups, M, TILE, PADDED)
    store_groups(out, shrink(x, N, M), first, groups, M)


def _elementwise(kernel: object, w: Tensor, n: int, m: int, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``(..., cols)`` to the same shape, group by group."""
    w = w.resolve_neg().contiguous()
    result = torch.empty_like(w, dtype=dtype) if out is None else out
    groups, padded = w.numel() // m, next_power_of_2(m)
    tile = max(1, (ELEMENTS if padded == m else PADDED_ELEMENTS) // padded)
    memory = result.view(torch.int8) if dtype == torch.bool else result
    launch(kernel, cdiv(groups, tile), (w, memory, groups), N=n, M=m, TILE=tile, PADDED=padded)
    return result


def mask(w: Tensor, n: int, m: int, out: Tensor | None = None) -> Tensor:
    """``nm_mask``."""
    return _elementwise(mask_kernel, w, n, m, out, torch.bool)


def prune(w: Tensor, n: int, m: int, out: Tensor | None = None) -> Tensor:
    """``nm_prune``."""
    return _elementwise(prune_kernel, w, n, m, out, w.dtype)


def soft_threshold(w: Tensor, n: int, m: int, out: Tensor | None = None) -> Tensor:
    """``nm_soft_threshold``."""
    return _elementwise(soft_threshold_kernel, w, n, m, out, w.dtype)
