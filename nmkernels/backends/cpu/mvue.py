"""Unbiased N:M estimates of gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..shared import contiguous, packed
from .core import DTYPES, core, register


def _mvue_call(g: Tensor, dim: int, seed: Tensor, method: str) -> Any:
    """``g`` as (outer, length, inner) around ``dim``."""
    key, offset = seed.tolist()
    outer, inner = g.shape[:dim].numel(), g.shape[dim + 1 :].numel()
    return core().MvueCall(g.data_ptr(), outer, g.shape[dim], inner, key, offset, method == "approx")


@register("nm_mvue")
def _mvue(g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str, out: Tensor | None = None) -> Tensor:
    g, dim = contiguous(g), dim % g.dim()
    result = torch.empty_like(g) if out is None else out
    core().mvue(_mvue_call(g, dim, seed, method), DTYPES[g.dtype], n, m, result.data_ptr(), torch.get_num_threads())
    return result


@register("nm_mvue_compress")
def _mvue_compress(
    g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    g, dim = contiguous(g), dim % g.dim()
    lead = (*g.shape[:dim], *g.shape[dim + 1 :])
    values, indices = packed(g, lead, g.shape[dim], n, m) if out is None else out
    call = _mvue_call(g, dim, seed, method)
    core().mvue_compress(call, DTYPES[g.dtype], n, m, values.data_ptr(), indices.data_ptr(), torch.get_num_threads())
    return values, indices
