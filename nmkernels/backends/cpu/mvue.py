"""Unbiased N:M estimates of gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..shared import around, in_layout, packed
from .core import DTYPES, core, register


def _call(walk: tuple[Tensor, int, int, int], seed: Tensor, method: str) -> Any:
    return core().MvueCall(walk[0].data_ptr(), *walk[1:], *seed.tolist(), method == "approx")


@register("nm_mvue")
def _mvue(g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str, out: Tensor | None = None) -> Tensor:
    walk, result = around(g, dim), g.new_empty(g.shape) if out is None else out
    core().mvue(_call(walk, seed, method), DTYPES[g.dtype], n, m, result.data_ptr(), torch.get_num_threads())
    return result


@register("nm_mvue_compress")
def _mvue_compress(
    g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str, layout: str = "canonical", out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    if layout != "canonical":
        return in_layout(_mvue_compress(g, n, m, dim, seed, method), g.shape[dim], layout, out)
    walk = around(g, dim)
    values, indices = packed(g, g.movedim(dim, -1).shape[:-1], walk[2], n, m) if out is None else out
    core().mvue_compress(_call(walk, seed, method), DTYPES[g.dtype], n, m, values.data_ptr(), indices.data_ptr(), torch.get_num_threads())
    return values, indices
