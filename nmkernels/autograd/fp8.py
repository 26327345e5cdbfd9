"""FP8 GEMMs with per-tensor scaling: operands are rounded to FP8 and multiplied with sums in fp32.

The scale comes from the current largest magnitude, without margin, as in Hu et al., "S-STE", NeurIPS 2024, who simulate it. Emulation runs
on any device; it saves no time but shows how rounding affects training. On GPUs whose sparse tensor cores multiply FP8 (``multiplies``),
fprop with a 2:4 weight and wgrad with a 2:4 gradient run there on the same rounded operands; dgrad, which sums over the outputs, is
emulated.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .. import dispatch
from ..ops.pack import nm_metadata
from ..ops.quantize import RESULTS, nm_linear_quantized, nm_quantize, nm_quantize_pack
from ..pattern import BackendError
from ..reference.layouts import EIGHT_BIT, meta_shape, tile_of
from ..reference.quantize import scale_for

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

SCHEMES = {
    "paper": {"fprop": ("e4m3", "e4m3"), "dgrad": ("e5m2", "e5m2"), "wgrad": ("e5m2", "e5m2")},
    "hybrid": {"fprop": ("e4m3", "e4m3"), "dgrad": ("e5m2", "e4m3"), "wgrad": ("e5m2", "e4m3")},
}
"""Formats of the operands of each GEMM: (x, W̃), (g, W̃), (g, x). ``paper`` follows S-STE's public code; ``hybrid`` rounds only gradients to
e5m2, as is usual for FP8 training on hardware."""


def quantize(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Round x to FP8 with a scale from its largest magnitude: (values, step), x ≈ values · step, step = max|x| / (largest FP8 number).

    The values are exact FP8 numbers, stored as fp32 (fp64 for fp64). A tensor that is not finite gives NaN.
    """
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    scale = scale_for(x, DTYPES[kind])
    return (wide * scale).to(DTYPES[kind]).to(wide.dtype), 1.0 / scale


def operands(scheme: str, role: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rounded operands of one GEMM, and the scale of their product."""
    kinds = SCHEMES[scheme][role]
    (p, step_p), (q, step_q) = quantize(a, kinds[0]), quantize(b, kinds[1])
    return p, q, step_p * step_q


# ---- on sparse tensor cores


def multiplies(scheme: str, role: str, rows: int, cols: int, width: int, like: Tensor) -> bool:
    """Whether a GPU kernel runs fprop or wgrad in FP8, in the dtype and on the device of ``like``.

    The sparse operand, W̃ or gᵀ, is ``(rows, cols)``; the dense one has ``width`` tokens (fprop) or inputs (wgrad).
    """
    height, across = tile_of(EIGHT_BIT)
    if rows % height or cols % across or not cols or not width or like.dtype not in RESULTS or (role == "wgrad" and width % 8):
        return False
    dense, sparse = SCHEMES[scheme][role] if role == "fprop" else SCHEMES[scheme][role][::-1]
    return _multiplies(like.device, DTYPES[dense], DTYPES[sparse], role == "wgrad", dispatch.forced_backend() or "")


def _multiplies(device: torch.device, dense: torch.dtype, sparse: torch.dtype, transposed: bool, forced: str) -> bool:
    return _has_kernel(device, dense, sparse, transposed, forced)


# tracing calls it and keeps the result as a constant, as in gemm/forms.py
_multiplies._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _has_kernel(device: torch.device, dense: torch.dtype, sparse: torch.dtype, transposed: bool, forced: str) -> bool:
    rows, cols = tile_of(EIGHT_BIT)
    x, values = (torch.empty(shape, dtype=kind, device=device) for shape, kind in (((8, cols), dense), ((rows, cols // 2), sparse)))
    meta, step = torch.empty(meta_shape(rows, cols, EIGHT_BIT), dtype=torch.int32, device=device), torch.empty((), device=device)
    try:
        chosen = dispatch.choose("nm_linear_quantized", x, step, values, meta, step, None, torch.bfloat16, transposed, False)
    except BackendError:  # the forced backend has no such kernel
        return False
    return chosen.backend != "reference"


def linear(scheme: str, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """fprop x Wᵀ + b on sparse tensor cores, with W ``(out, in)`` 2:4; the result is rounded once."""
    kind, kind_w = (DTYPES[k] for k in SCHEMES[scheme]["fprop"])
    tokens = x.reshape(-1, x.shape[-1])
    scale, scale_w = scale_for(tokens, kind), scale_for(w, kind_w)
    values, meta = nm_quantize_pack(w, scale_w, kind_w)
    eight = nm_quantize(tokens, scale, kind, False)
    y: Tensor = nm_linear_quantized(eight, 1.0 / scale, values, meta, 1.0 / scale_w, bias, x.dtype, False, False)
    return y.reshape(*x.shape[:-1], -1)


def wgrad(scheme: str, values: Tensor, indices: Tensor, x: Tensor) -> Tensor:
    """wgrad gᵀ x ``(out, in)`` on sparse tensor cores, with gᵀ ``(out, tokens)`` compressed to 2:4."""
    kind_g, kind = (DTYPES[k] for k in SCHEMES[scheme]["wgrad"])
    scale, scale_g = scale_for(x, kind), scale_for(values, kind_g)
    meta = nm_metadata(indices, x.shape[0], EIGHT_BIT)
    g, eight = nm_quantize(values, scale_g, kind_g, False), nm_quantize(x, scale, kind, True)
    dw: Tensor = nm_linear_quantized(eight, 1.0 / scale, g, meta, 1.0 / scale_g, None, x.dtype, True, False)
    return dw
