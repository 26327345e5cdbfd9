"""The three products of a linear layer with one operand compressed: fprop nt, dgrad nn, wgrad tn.

``_plan``, or ``tuned`` where something was measured, chooses between a kernel for a few tokens, expanding in registers tile by tile, and
expanding to memory. In all of them a dense tile is multiplied, so that an inf or NaN of the other operand reaches every result of its
column, as in the dense product; but not in the kernel for a few tokens. Indices are not checked, which would make the host wait: a value
whose index is outside its group is left out.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...pattern import Pattern
from . import _launch
from ._epilogue import combine
from ._few import few
from ._launch import cdiv, launch, next_power_of_2, triton
from ._plan import Plan, by_words
from ._spmm import spmm_kernel, spmm_transposed_kernel
from .compress import decompress
from .tuned import choose, tile_of


@lru_cache(maxsize=64)
def _capability_of(device: torch.device) -> int:
    if device.type != "cuda" or torch.version.hip:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def capability(x: Tensor) -> int:
    """The compute capability that a call with ``x`` is planned for: 80, 90, ...; 0 where there is no such thing."""
    if _launch.instead is not None:
        return int(triton.runtime.driver.active.get_current_target().arch)
    return _capability_of(x.device)


def matrix(x: Tensor) -> Tensor:
    """``x`` as a matrix, its leading dimensions one; a copy only where they do not lie evenly or the sign bit is pending."""
    x = x.resolve_neg() if x.is_neg() else x
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def packed(values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The compressed operand as the kernels read it: its rows next to each other."""
    return (values.resolve_neg() if values.is_neg() else values).contiguous(), indices.contiguous()


def _aligned(values: Tensor, indices: Tensor, n: int) -> bool:
    """Whether the values of groups and four index bytes are integers in memory."""
    return not (values.data_ptr() % (n * values.element_size()) or indices.data_ptr() & 3)


class Call(NamedTuple):
    """What a launch takes besides tensors and strides."""

    programs: int
    groups: int
    index_row: int
    constexprs: dict[str, Any]


@lru_cache(maxsize=4096)
def _call(
    p: Plan, dtype: torch.dtype, rows: int, cols: int, width: int, n: int, m: int, aligned: bool, precision: str, activation: str | None,
    capability: int,
) -> Call:  # fmt: skip
    """Of ``spmm_kernel``, or without an activation of ``spmm_transposed_kernel``."""
    pattern, padded = Pattern(n, m), next_power_of_2(m)
    groups, tile = cdiv(cols, m), max(1, p.cols // padded)
    words, even = aligned and by_words(dtype, n, m, cols), min(16, groups & -groups) or 16
    shared = {"N": n, "M": m, "BITS": pattern.index_bits, "ROWS": p.rows, "COLS": p.width, "GROUPS": tile, "PADDED": padded}
    last = {"PRECISION": precision, "enable_fp_fusion": True}
    if activation is None:
        whole = groups % tile == 0 and rows % p.rows == 0
        programs = cdiv(width, p.width) * cdiv(groups, tile)
        return Call(programs, groups, pattern.index_bytes(cols), {**shared, "WORDS": words, "WHOLE": whole, "EVEN": even, **last})
    whole = cols == groups * m and groups % tile == 0
    middle = {"SPLITS": p.splits, "WORDS": words, "WHOLE": whole, "EVEN": even, "ACTIVATION": activation if p.splits == 1 else ""}
    programs = cdiv(rows, p.rows) * cdiv(width, p.width) * p.splits
    wgmma = capability == 90 and (dtype != torch.float32 or precision == "tf32")
    return Call(programs, groups, pattern.index_bytes(cols), {**shared, **middle, "WGMMA": wgmma, **last})


def _precision(dtype: torch.dtype) -> str:
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _spmm(
    p: Plan, values: Tensor, indices: Tensor, n: int, m: int, cols: int, b: Tensor, by: tuple[int, ...],
    bias: Tensor | None, activation: str, c: Tensor, to: tuple[int, ...],
) -> None:  # fmt: skip
    """c = activation(E b + bias); ``by`` and ``to`` are the strides of b ``[cols, width]`` and of c ``[rows, width]``."""
    values, indices = packed(values, indices)
    rows, count, whole = values.shape[0], c.numel(), p.splits == 1
    width = count // rows
    aligned, precision = _aligned(values, indices, n), _precision(c.dtype)
    call = _call(p, c.dtype, rows, cols, width, n, m, aligned, precision, activation, capability(c))
    sums = c if whole else c.new_empty(p.splits, count, dtype=torch.float32)
    args = (values, indices, b, bias if whole else None, sums, rows, cols, width, call.groups, call.index_row, *by, *to)
    launch(spmm_kernel, call.programs, args, p.warps, p.stages, **call.constexprs)
    if not whole:
        combine(sums, bias, c, rows, activation)


def _activated(y: Tensor, activation: str) -> Tensor:
    """The activation of a product that is rounded already."""
    if activation == "gelu":
        return F.gelu(y)
    if activation == "silu":
        return F.silu(y)
    return F.relu(y).square_() if activation == "relu2" else y


def _deliver(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)


def linear(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = "",
    residual: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``nm_linear``."""
    y = _linear(x, values, indices, n, m, cols, bias, activation, out)
    return y if residual is None else y.add_(residual)


def _linear(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None, activation: str, out: Tensor | None
) -> Tensor:
    rows, flat = values.shape[0], matrix(x)
    p = choose("fprop", x.dtype, rows, cols, flat.shape[0], n, m, x.device, capability(x))
    if p.method == "scratch":
        y = F.linear(x, decompress(values, indices, n, m, cols), bias)
        return _deliver(_activated(y, activation), out)
    y = x.new_empty(*x.shape[:-1], rows) if out is None else out
    if y.numel():
        b = None if bias is None else bias.resolve_neg().contiguous()
        if p.method in ("few", "tile"):
            tile = None if p.method == "few" else tile_of(p, x.element_size(), n, m, cols)
            few(flat.contiguous(), *packed(values, indices), n, m, cols, b, activation, y, tile)
            return y
        _spmm(p, values, indices, n, m, cols, flat, (flat.stride(1), flat.stride(0)), b, activation, y, (1, rows))
    return y


def linear_dgrad(g: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, out: Tensor | None = None) -> Tensor:
    """``nm_linear_dgrad``."""
    rows, flat = values.shape[0], matrix(g)
    tokens = flat.shape[0]
    p = choose("dgrad", g.dtype, rows, cols, tokens, n, m, g.device, capability(g))
    if p.method == "scratch":
        return _deliver(g @ decompress(values, indices, n, m, cols), out)
    dx = g.new_empty(*g.shape[:-1], cols) if out is None else out
    if dx.numel():
        values, indices = packed(values, indices)
        call = _call(p, g.dtype, rows, cols, tokens, n, m, _aligned(values, indices, n), _precision(g.dtype), None, capability(g))
        args = (values, indices, flat, dx, rows, cols, tokens, call.groups, call.index_row, *flat.stride())
        launch(spmm_transposed_kernel, call.programs, args, p.warps, p.stages, **call.constexprs)
    return dx


def linear_wgrad(values: Tensor, indices: Tensor, n: int, m: int, cols: int, x: Tensor, out: Tensor | None = None) -> Tensor:
    """``nm_linear_wgrad``."""
    rows, width = values.shape[0], x.shape[1]
    p = choose("wgrad", x.dtype, rows, cols, width, n, m, x.device, capability(x))
    if p.method == "scratch":
        return _deliver(decompress(values, indices, n, m, cols) @ x, out)
    dw = x.new_empty(rows, width) if out is None else out
    if dw.numel():
        x = matrix(x)
        _spmm(p, values, indices, n, m, cols, x, x.stride(), None, "", dw, (width, 1))
    return dw
