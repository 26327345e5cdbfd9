"""mvue and mvue_compress: unbiased N:M estimates, along the last dimension or another one.

Memory is viewed as ``(outer, length, inner)`` around the grouped dimension. The kernels read the seed tensor from memory.
"""

from __future__ import annotations

from torch import Tensor

from ..shared import around, packed
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
    g: Tensor, n: int, m: int, dim: int, seed: Tensor, method: str, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    if out is None:
        out = packed(g, g.movedim(dim, -1).shape[:-1], g.shape[dim], n, m)
    (g, *sizes), seed = around(g, dim, transposed=True), seed.contiguous()
    addresses = out[0].data_ptr(), out[1].data_ptr()
    core(g).mvue_compress(g.data_ptr(), DTYPES[g.dtype], *sizes, n, m, seed.data_ptr(), method == "approx", *addresses, *queue(g))
    return out
