"""8-bit tensors: rounding, optionally transposed, packing at 2:4 in one read, and the GEMM of two of them.

The GEMM is 8-bit ``wgmma.sp``, only for GPUs of compute capability 9.0. Its PTX is also tested on the CPU. Metadata
is not checked; an inf or NaN of x reaches a result only through a stored value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import Verdict
from ...reference.layouts import EIGHT_BIT, meta_shape
from ..shared import address, aligned, contiguous
from .core import DTYPES, core, queue, register
from .linear import plan, wgmma_obstacle

EIGHT_BITS = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5, torch.int8: 6}
"""The core's code for each 8-bit dtype."""


@register("nm_quantize")
def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
    if not x.is_contiguous() and x.t().is_contiguous():
        x, transposed = x.t(), not transposed
    x, scale = contiguous(x), contiguous(scale)
    rows, cols = x.shape
    values = x.new_empty((cols, rows) if transposed else (rows, cols), dtype=dtype)
    if values.numel():
        core(x).quantize(
            x.data_ptr(), scale.data_ptr(), values.data_ptr(), rows, cols, DTYPES[x.dtype], EIGHT_BITS[dtype],
            scale.numel() > 1, transposed, *queue(x),
        )  # fmt: skip
    return values


@register("nm_quantize_pack")
def quantize_pack(w: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    w, scale, (rows, cols) = aligned(w), contiguous(scale), w.shape
    values = w.new_empty(rows, cols // 2, dtype=dtype)
    meta = w.new_empty(meta_shape(rows, cols, EIGHT_BIT), dtype=torch.int32)
    if values.numel():
        core(w).quantize_pack(
            w.data_ptr(), scale.data_ptr(), values.data_ptr(), meta.data_ptr(), rows, cols, DTYPES[w.dtype], EIGHT_BITS[dtype],
            scale.numel() > 1, *queue(w),
        )  # fmt: skip
    return values, meta


def takes(
    x: Tensor, x_step: Tensor, values: Tensor, meta: Tensor, step: Tensor, bias: Tensor | None, dtype: torch.dtype, transposed: bool,
    fast: bool,
) -> Verdict:  # fmt: skip
    """Whether ``wgmma.sp`` can multiply these operands."""
    module = core(values)
    obstacle = wgmma_obstacle(module, values.get_device())
    if obstacle:
        return False, obstacle
    if not module.gemm_wgmma_8bit_has(EIGHT_BITS[values.dtype], EIGHT_BITS[x.dtype], transposed):
        way = "transposed" if transposed else "straight"
        return False, f"it has no kernel of {values.dtype} by {x.dtype} whose result is stored {way}"
    if not values.shape[1]:
        return False, "the operands have no columns"
    if transposed and x.shape[0] % 8:
        return False, f"it stores 8 columns of the transposed result at once, and this one has {x.shape[0]}"
    return True, "sparse tensor cores, by 8-bit wgmma.sp"


@register("nm_linear_quantized", takes)
def linear_quantized(
    x: Tensor, x_step: Tensor, values: Tensor, meta: Tensor, step: Tensor, bias: Tensor | None, dtype: torch.dtype, transposed: bool,
    fast: bool,
) -> Tensor:  # fmt: skip
    x, values, meta, x_step, step = aligned(x), aligned(values), aligned(meta), contiguous(x_step), contiguous(step)
    (n, k), m, module = x.shape, values.shape[0], core(values)
    wide = dtype != torch.bfloat16 or (bias is not None and transposed)  # fp32 sums; torch adds the bias and rounds
    out = x.new_empty((m, n) if transposed else (n, m), dtype=torch.float32 if wide else dtype)
    if out.numel():
        b = None if wide or bias is None else aligned(bias)
        promotes = not fast and x.dtype != torch.int8
        tile, splits = plan(module, "gemm_wgmma_8bit", values.get_device(), m, n, k, promotes)
        parts = x.new_empty(splits, m, n, dtype=torch.float32) if splits > 1 else None
        tensors = values, meta, x, step, x_step, b, out, parts
        kinds = DTYPES[out.dtype], EIGHT_BITS[values.dtype], EIGHT_BITS[x.dtype], step.numel() > 1, x_step.numel() > 1, promotes
        module.gemm_wgmma_sp_8bit(*map(address, tensors), *kinds, m, n, k, transposed, tile, splits, *queue(x))
    if not wide:
        return out
    if bias is not None:
        out += bias[:, None] if transposed else bias
    return out.to(dtype)
