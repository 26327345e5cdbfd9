"""The three GEMMs of a linear layer with one operand compressed.

The kernels multiply only stored values, so an inf or NaN in the other operand reaches a result only through a stored weight (which may be
zero). Whether to use torch's dense GEMM instead is decided in ``nmkernels.gemm``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.common import compute_dtype
from ...reference.linear import ACTIVATIONS
from ..shared import contiguous
from .core import DTYPES, core, register
from .groups import check_indices


@register("nm_linear")
def linear(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = "",
    residual: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    shape = x.shape
    if not (x.is_contiguous() and values.is_contiguous() and indices.is_contiguous()) or x.is_neg() or values.is_neg():
        x, values, indices = contiguous(x), contiguous(values), indices.contiguous()
    if bias is not None and (not bias.is_contiguous() or bias.is_neg()):
        bias = contiguous(bias)
    rows, module = values.shape[0], core()
    tokens = x.numel() // cols if cols else shape[:-1].numel()
    y = x.new_empty((*shape[:-1], rows)) if out is None else out
    addresses = x.data_ptr(), values.data_ptr(), indices.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr()
    if not module.linear(*addresses, DTYPES[x.dtype], tokens, rows, cols, n, m, torch.get_num_threads()):
        check_indices("linear", False, m)
    if activation:  # in float32, but applied to the rounded result
        y.copy_(ACTIVATIONS[activation](y.to(compute_dtype(y.dtype))))
    return y if residual is None else y.add_(residual)


@register("nm_linear_dgrad")
def linear_dgrad(g: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, out: Tensor | None = None) -> Tensor:
    rows, tokens, module = values.shape[0], g.shape[:-1].numel(), core()
    if not (g.is_contiguous() and values.is_contiguous() and indices.is_contiguous()) or g.is_neg() or values.is_neg():
        g, values, indices = contiguous(g), contiguous(values), indices.contiguous()
    dx = g.new_empty((*g.shape[:-1], cols)) if out is None else out
    # (tokens, cols) is the core's matrix [cols, tokens] with strides 1 and cols
    operands = values.data_ptr(), indices.data_ptr(), rows, cols, tokens, g.data_ptr(), 1, rows, 0, dx.data_ptr(), 1, cols, False
    valid = module.spmm_transposed(module.SpmmCall(*operands), DTYPES[g.dtype], n, m, torch.get_num_threads())
    if not valid:
        check_indices("linear_dgrad", valid, m)
    return dx


@register("nm_linear_wgrad")
def linear_wgrad(
    values: Tensor, indices: Tensor, n: int, m: int, cols: int, x: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    rows, width, module = values.shape[0], x.shape[1], core()
    x, values, indices = contiguous(x), contiguous(values), indices.contiguous()
    dw = x.new_empty(rows, width, dtype=out_dtype or x.dtype) if out is None else out
    to = dw.data_ptr(), width, 1, dw.dtype != x.dtype
    operands = values.data_ptr(), indices.data_ptr(), rows, cols, width, x.data_ptr(), width, 1, 0, *to
    valid = module.spmm(module.SpmmCall(*operands), DTYPES[x.dtype], n, m, torch.get_num_threads())
    check_indices("linear_wgrad", valid, m)
    return dw
