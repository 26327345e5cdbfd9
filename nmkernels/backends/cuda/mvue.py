"""mvue and mvue_compress: unbiased N:M estimates, along the last dimension or another one.

Memory is viewed as ``(outer, length, inner)`` around the grouped dimension. The kernels read the seed tensor from memory. In training on
Hopper, down the columns of a matrix of whole tiles, one kernel also writes metadata in the order of ``wgmma.sp``; other metadata is made
from canonical indices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...pattern import Pattern
from ...reference.layouts import operand_shapes
from ..shared import around, packed
from .compress import metadata
from .core import DTYPES, core, queue, register


@register("nm_mvue")
def mvue(g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str, out: Tensor | None = None) -> Tensor:
    result = g.new_empty(g.shape) if out is None else out
    (g, *sizes), seed = around(g, dim), seed.contiguous()
    core(g).mvue(
        g.data_ptr(), DTYPES[g.dtype], *sizes, n, m, seed.data_ptr(), method == "approx", result.data_ptr(), *queue(g)
    )  # fmt: skip
    return result


@register("nm_mvue_compress")
def mvue_compress(
    g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str, layout: str = "canonical", out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    lead, cols = g.movedim(dim, -1).shape[:-1], g.shape[dim]
    (g, *sizes), seed = around(g, dim, transposed=True), seed.contiguous()

    def write(values: Tensor, indices: Tensor, ordered: bool) -> bool:
        sampled, to = (n, m, seed.data_ptr(), method == "approx"), (values.data_ptr(), indices.data_ptr())
        return bool(core(g).mvue_compress(g.data_ptr(), DTYPES[g.dtype], *sizes, *sampled, *to, ordered, *queue(g)))

    if layout == "canonical":
        out = out or packed(g, lead, cols, n, m)
        write(*out, False)
        return out
    values, meta = out or (
        g.new_empty(shape, dtype=dtype)
        for shape, dtype in zip(operand_shapes(Pattern(n, m), lead[0], cols, layout), (g.dtype, torch.int32), strict=True)
    )
    if layout != "wgmma.sp" or not write(values, meta, True):
        _, indices = packed(g, lead, cols, n, m)
        write(values, indices, False)
        metadata(indices, cols, layout, meta)
    return values, meta
