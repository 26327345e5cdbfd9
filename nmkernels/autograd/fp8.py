"""FP8 GEMMs: operands rounded to the 8-bit grid of their present range, multiplied and summed in fp32.

Hu et al., "S-STE", NeurIPS 2024, train with it in simulation: per-tensor scale from the current largest magnitude, no margin. Emulated it
runs on any device and saves no time; it shows what the roundings do to training. Where the sparse tensor cores of the GPU multiply 8 bits
(``multiplies``), fprop by a 2:4 weight and wgrad by a 2:4 gradient take the same rounded operands there; dgrad, which sums along the
outputs, is emulated.
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
"""Formats of the two operands of each GEMM: x and W̃; g and W̃; g and x. ``paper`` is S-STE's public code, ``hybrid`` rounds only
gradients to e5m2, as hardware recipes for FP8 training do."""


def quantize(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """x on the FP8 grid that its largest magnitude spans: (values, step) with x ≈ values · step, step = max|x| / largest.

    Values are exact FP8 numbers in fp32 (fp64 for fp64). A tensor that is not finite gives NaN.
    """
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    scale = scale_for(x, DTYPES[kind])
    return (wide * scale).to(DTYPES[kind]).to(wide.dtype), 1.0 / scale


def operands(scheme: str, role: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both operands of one GEMM on their grids, and the number that the GEMM of the two must be multiplied by."""
    kinds = SCHEMES[scheme][role]
    (p, step_p), (q, step_q) = quantize(a, kinds[0]), quantize(b, kinds[1])
    return p, q, step_p * step_q


# ---- on sparse tensor cores


def multiplies(scheme: str, role: str, rows: int, cols: int, width: int, like: Tensor) -> bool:
    """Whether a GPU's 8-bit kernel does fprop or wgrad: a 2:4 operand ``(rows, cols)``, W̃ or gᵀ, by one of ``width`` rows, tokens or
    inputs, in the dtype and on the device of ``like``."""
    height, across = tile_of(EIGHT_BIT)
    if rows % height or cols % across or not cols or not width or like.dtype not in RESULTS or (role == "wgrad" and width % 8):
        return False
    dense, sparse = SCHEMES[scheme][role] if role == "fprop" else SCHEMES[scheme][role][::-1]
    return _multiplies(like.device, DTYPES[dense], DTYPES[sparse], role == "wgrad", dispatch.forced_backend() or "")


def _multiplies(device: torch.device, dense: torch.dtype, sparse: torch.dtype, transposed: bool, forced: str) -> bool:
    return _asked(device, dense, sparse, transposed, forced)


# tracing calls it and keeps the answer, as in gemm/forms.py
_multiplies._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _asked(device: torch.device, dense: torch.dtype, sparse: torch.dtype, transposed: bool, forced: str) -> bool:
    rows, cols = tile_of(EIGHT_BIT)
    x, values = (torch.empty(shape, dtype=kind, device=device) for shape, kind in (((8, cols), dense), ((rows, cols // 2), sparse)))
    meta, step = torch.empty(meta_shape(rows, cols, EIGHT_BIT), dtype=torch.int32, device=device), torch.empty((), device=device)
    try:
        found = dispatch.choose("nm_linear_quantized", x, step, values, meta, step, None, torch.bfloat16, transposed, False)
    except BackendError:  # the one that is asked for by name does not
        return False
    return found.backend != "reference"


def linear(scheme: str, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """fprop, x Wᵀ + b, of a W ``(out, in)`` with at most two non-zeros in every four; rounded once."""
    kind, kind_w = (DTYPES[k] for k in SCHEMES[scheme]["fprop"])
    tokens = x.reshape(-1, x.shape[-1])
    scale, scale_w = scale_for(tokens, kind), scale_for(w, kind_w)
    values, meta = nm_quantize_pack(w, scale_w, kind_w)
    eight = nm_quantize(tokens, scale, kind, False)
    y: Tensor = nm_linear_quantized(eight, 1.0 / scale, values, meta, 1.0 / scale_w, bias, x.dtype, False, False)
    return y.reshape(*x.shape[:-1], -1)


def wgrad(scheme: str, values: Tensor, indices: Tensor, x: Tensor) -> Tensor:
    """gᵀ x ``(out, in)`` of a gᵀ ``(out, tokens)`` compressed at 2:4, for which x is rounded transposed."""
    kind_g, kind = (DTYPES[k] for k in SCHEMES[scheme]["wgrad"])
    scale, scale_g = scale_for(x, kind), scale_for(values, kind_g)
    meta = nm_metadata(indices, x.shape[0], EIGHT_BIT)
    g, eight = nm_quantize(values, scale_g, kind_g, False), nm_quantize(x, scale, kind, True)
    dw: Tensor = nm_linear_quantized(eight, 1.0 / scale, g, meta, 1.0 / scale_g, None, x.dtype, True, False)
    return dw
