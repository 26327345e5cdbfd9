"""Emulated FP8 GEMMs: operands rounded to the 8-bit grid of their present range, multiplied and summed in fp32.

Hu et al., "S-STE", NeurIPS 2024, train with it in simulation: per-tensor scale from the current largest magnitude, no margin. It runs
on any device and saves no time; it shows what the roundings do to training.
"""

from __future__ import annotations

import torch
from torch import Tensor

FORMATS = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}
"""Name -> dtype and largest finite number."""

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
    dtype, largest = FORMATS[kind]
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    top = wide.abs().amax() if x.numel() else torch.zeros((), dtype=wide.dtype, device=x.device)
    scale = largest / top
    # nothing to scale, or a tensor of denormals whose scale would overflow
    scale = torch.where((top == 0) | scale.isposinf(), 1.0, scale)
    return (wide * scale).to(dtype).to(wide.dtype), 1.0 / scale


def operands(scheme: str, role: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both operands of one GEMM on their grids, and the number that the GEMM of the two must be multiplied by."""
    kinds = SCHEMES[scheme][role]
    (p, step_p), (q, step_q) = quantize(a, kinds[0]), quantize(b, kinds[1])
    return p, q, step_p * step_q
