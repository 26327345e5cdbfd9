"""The three products of a linear layer with one operand compressed."""

from __future__ import annotations

import torch
from torch import Tensor

from ._core import DTYPES, contiguous, core, register
from .groups import check_indices, expand

FEW_TOKENS = 16
"""Up to so many tokens ``linear`` works on the compressed form; above, on the decompressed weight."""


def _deliver(result: Tensor, out: Tensor | None) -> Tensor:
    return result.contiguous() if out is None else out.copy_(result)


@register("nm_linear")
def _linear(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    rows = values.shape[0]
    tokens = x.shape[:-1].numel()
    if tokens > FEW_TOKENS:
        return _deliver(torch.nn.functional.linear(x, expand("linear", values, indices, n, m, cols), bias), out)
    x, values, indices = contiguous(x), contiguous(values), indices.contiguous()
    b = None if bias is None else contiguous(bias)
    y = x.new_empty(*x.shape[:-1], rows) if out is None else out
    addresses = (x.data_ptr(), values.data_ptr(), indices.data_ptr(), 0 if b is None else b.data_ptr(), y.data_ptr())
    valid = core().linear(*addresses, DTYPES[x.dtype], tokens, rows, cols, n, m, torch.get_num_threads())
    check_indices("linear", valid, m)
    return y


@register("nm_linear_dgrad")
def _linear_dgrad(g: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, out: Tensor | None = None) -> Tensor:
    return _deliver(g @ expand("linear_dgrad", values, indices, n, m, cols), out)


@register("nm_linear_wgrad")
def _linear_wgrad(values: Tensor, indices: Tensor, n: int, m: int, cols: int, x: Tensor, out: Tensor | None = None) -> Tensor:
    return _deliver(expand("linear_wgrad", values, indices, n, m, cols) @ x, out)
