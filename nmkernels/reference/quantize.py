"""8-bit tensors with a scale: rounding, packing at 2:4 for tensor cores, and the GEMM of two such tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from .common import compute_dtype
from .compress import compress, decompress
from .layouts import EIGHT_BIT, from_layout, to_layout

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
"""Largest finite number of each 8-bit dtype."""


def scale_for(x: Tensor, dtype: torch.dtype, rows: bool = False) -> Tensor:
    """The scale largest / max|x|, 0-d, or one per row if ``rows``; fp32 (fp64 for fp64).

    1 if x is zero, or if the scale would overflow (denormals); NaN if x has a NaN, 0 if it has an infinity.
    """
    wide = compute_dtype(x.dtype)
    if x.numel():
        low, high = x.aminmax(dim=-1) if rows else x.aminmax()
        top = torch.maximum(-low, high).to(wide)
    else:
        top = x.new_zeros(x.shape[:-1] if rows else (), dtype=wide)
    scale = LARGEST[dtype] / top
    return torch.where((top == 0) | scale.isposinf(), 1.0, scale)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to nearest, ties to even, saturating at the largest number; NaN stays NaN, or becomes 0 in int8."""
    x = x.clamp(-LARGEST[dtype], LARGEST[dtype])
    return x.round().nan_to_num(0.0).to(dtype) if dtype == torch.int8 else x.to(dtype)


def _scaled(x: Tensor, scale: Tensor) -> Tensor:
    return x.to(compute_dtype(x.dtype)) * scale.reshape(-1, 1)


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype, transposed: bool = False) -> Tensor:
    """Round x ``(rows, cols)``, or its transpose, times ``scale`` to 8 bits; ``scale`` is one number or one per row of the result.

    The product is rounded to fp32 (fp64 for fp64), then to ``dtype``.
    """
    return rounded(_scaled(x.t() if transposed else x, scale), dtype)


def quantize_pack(w: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compress by magnitude at 2:4, times ``scale``, to 8 bits; positions in the layout ``"wgmma.sp.8bit"``."""
    values, indices = compress(w, 2, 4)
    return rounded(_scaled(values, scale), dtype), to_layout(indices, w.shape[1], EIGHT_BIT)


def linear_quantized(
    x: Tensor, x_step: Tensor, values: Tensor, meta: Tensor, step: Tensor, bias: Tensor | None, dtype: torch.dtype, transposed: bool,
    fast: bool,
) -> Tensor:  # fmt: skip
    """y = (x Wᵀ) · x_step · step + b for x ``(tokens, in)`` and W ``(out, in)`` packed at 2:4, both in 8 bits.

    Computed in fp32 regardless of ``fast``, int8 in fp64, where sums are exact; rounded once at the end.
    """
    wide = torch.float64 if x.dtype in (torch.float64, torch.int8) else torch.float32
    w = decompress(values.to(wide), from_layout(meta, EIGHT_BIT), 2, 4, x.shape[1])
    y = (x.to(wide) @ w.T) * (x_step.reshape(-1, 1) * step.reshape(1, -1))
    y = y if bias is None else y + bias.to(y.dtype)
    y = y.to(torch.float64 if x.dtype == torch.float64 else dtype)
    return y.t().contiguous() if transposed else y
