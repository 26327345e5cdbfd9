"""The three GEMMs of a linear layer with one compressed operand: decompress, then multiply.

float16 and bfloat16 are multiplied in float32 and rounded once, unless the result is to be float32; float64 in float64. Indices in int32
are metadata (``layouts``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .common import compute_dtype
from .compress import decompress
from .layouts import from_layout, layout_of

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda y: y,
    "gelu": F.gelu,
    "silu": F.silu,
    "relu2": lambda y: F.relu(y).square(),
}
"""Activations that fprop can apply before rounding: none, GELU y·Φ(y), SiLU y/(1 + exp(-y)), squared ReLU max(y, 0)²."""


def _operands(x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int) -> tuple[Tensor, Tensor]:
    """Both operands dense and in the compute dtype."""
    wide = compute_dtype(x.dtype)
    indices = from_layout(indices, layout_of(indices))
    return x.to(wide), decompress(values, indices, n, m, cols).to(wide)


def linear(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = "",
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """fprop, layout nt: y = f(x Wᵀ + b) + r with W ``(out, in)`` compressed along ``in``; rounded once, at the end."""
    a, w = _operands(x, values, indices, n, m, cols)
    y = a @ w.T
    if bias is not None:
        y = y + bias.to(y.dtype)
    y = ACTIVATIONS[activation](y)
    if residual is not None:
        y = y + residual.to(y.dtype)
    return y.to(x.dtype)


def linear_dgrad(g: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int) -> Tensor:
    """dgrad, layout nn: dx = g W ``(..., in)`` with W ``(out, in)`` compressed along ``in``."""
    a, w = _operands(g, values, indices, n, m, cols)
    return (a @ w).to(g.dtype)


def linear_wgrad(values: Tensor, indices: Tensor, n: int, m: int, cols: int, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """wgrad, layout tn: dW = gᵀ x ``(out, in)``, with gᵀ ``(out, tokens)`` compressed along tokens, in x's dtype or ``out_dtype``."""
    a, g = _operands(x, values, indices, n, m, cols)
    return (g @ a).to(out_dtype or x.dtype)
