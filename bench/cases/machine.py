"""The machine's own limits as cases, so that figures can be drawn against them."""

from __future__ import annotations

import torch

from ..registry import Grid, Provider, Spec, Work, family
from . import _ours


@family(
    "copy",
    grids=(
        Grid(("4096x11008",), ("",), ("float32", "bfloat16")),
        Grid(_ours.STREAM, ("",), ("bfloat16",), on="cuda"),
    ),
)
def copy(spec: Spec, device: str) -> Work:
    """``copy_`` of a matrix, counted as one read and one write."""
    a = _ours.normal(spec.rows, spec.cols, device=device, dtype=spec.torch_dtype)
    b = torch.empty_like(a)
    return Work([Provider("torch", lambda: b.copy_(a), 2 * a.nbytes)])


@family(
    "matmul",
    grids=(
        Grid(("2048x2048",), ("",), ("float32", "bfloat16"), (2048,)),
        Grid(("8192x8192",), ("",), ("bfloat16",), (8192,), on="cuda"),
    ),
)
def matmul(spec: Spec, device: str) -> Work:
    """``x @ w`` with tokens x rows and rows x cols."""
    x = _ours.normal(spec.tokens, spec.rows, device=device, dtype=spec.torch_dtype)
    w = _ours.normal(spec.rows, spec.cols, device=device, dtype=spec.torch_dtype)
    moved = (x.numel() + w.numel() + spec.tokens * spec.cols) * x.element_size()
    return Work([Provider("torch", lambda: x @ w, moved, 2 * spec.tokens * spec.rows * spec.cols)])
