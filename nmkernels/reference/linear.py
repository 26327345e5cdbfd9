"""The three GEMMs of a linear layer with one operand in compressed form: decompress, then multiply.

Of fprop and wgrad the operand's indices may be the metadata of tensor cores (``layouts``) instead of the canonical ones.

float16 and bfloat16 are multiplied in float32 and rounded once; float64 in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from ..pattern import ShapeError
from .common import check_float, check_same_dtype, compute_dtype
from .compress import decompress
from .layouts import from_layout, layout_of

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda y: y,
    "gelu": F.gelu,
    "silu": F.silu,
    "relu2": lambda y: F.relu(y).square(),
}
"""What may follow fprop before it is rounded: nothing, GELU y·Φ(y), SiLU y/(1 + exp(-y)), squared ReLU max(y, 0)²."""


def activate(op: str, y: Tensor, activation: str) -> Tensor:
    """The activation of that name in the dtype of ``y``; raises ``ValueError`` for any other name."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation {activation!r} is unknown; choose one of {', '.join(repr(a) for a in ACTIVATIONS)}.")
    return ACTIVATIONS[activation](y)


def _operands(op: str, x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int) -> tuple[Tensor, Tensor]:
    check_float(op, "the input", x)
    check_same_dtype(op, "the input", x, "the compressed values", values)
    if values.dim() != 2 or x.dim() == 0:
        raise ShapeError(f"{op}: needs 2-D values and an input of at least one dimension, got {tuple(values.shape)} and {tuple(x.shape)}.")
    wide = compute_dtype(x.dtype)
    indices = from_layout(indices, layout_of(indices))
    return x.to(wide), decompress(values, indices, n, m, cols).to(wide)


def _check_size(op: str, what: str, got: int, need: int) -> None:
    if got != need:
        raise ShapeError(f"{op}: {what} is {got}, but the compressed operand needs {need}.")


def linear(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = "",
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """fprop, layout nt: y = f(x Wᵀ + b) + r with W ``(out, in)`` compressed along ``in``; rounded once, at the end."""
    a, w = _operands("linear", x, values, indices, n, m, cols)
    _check_size("linear", "the input's last dimension", x.shape[-1], cols)
    y = a @ w.T
    if bias is not None:
        check_same_dtype("linear", "the input", x, "the bias", bias)
        if bias.shape != (values.shape[0],):
            raise ShapeError(f"linear: the bias has shape {tuple(bias.shape)}, but ({values.shape[0]},) is needed.")
        y = y + bias.to(y.dtype)
    y = activate("linear", y, activation)
    if residual is not None:
        if residual.dtype != x.dtype or residual.shape != y.shape:
            raise ShapeError(f"linear: the residual is {residual.dtype} {tuple(residual.shape)}, but {x.dtype} {tuple(y.shape)} is needed.")
        y = y + residual.to(y.dtype)
    return y.to(x.dtype)


def linear_dgrad(g: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int) -> Tensor:
    """dgrad, layout nn: dx = g W ``(..., in)`` with W ``(out, in)`` compressed along ``in``."""
    a, w = _operands("linear_dgrad", g, values, indices, n, m, cols)
    _check_size("linear_dgrad", "the gradient's last dimension", g.shape[-1], values.shape[0])
    return (a @ w).to(g.dtype)


def linear_wgrad(values: Tensor, indices: Tensor, n: int, m: int, cols: int, x: Tensor) -> Tensor:
    """wgrad, layout tn: dW = gᵀ x ``(out, in)``, where gᵀ ``(out, tokens)`` comes compressed along tokens."""
    a, g = _operands("linear_wgrad", x, values, indices, n, m, cols)
    if x.dim() != 2:
        raise ShapeError(f"linear_wgrad: x has shape {tuple(x.shape)}, but (tokens, in) is needed; flatten its leading dimensions.")
    _check_size("linear_wgrad", "the number of tokens", x.shape[0], cols)
    return (g @ a).to(x.dtype)
