"""The three GEMMs of a linear layer with one compressed operand: fprop nt, dgrad nn, wgrad tn.

``launches`` chooses between a kernel for a few tokens, expansion in registers tile by tile, and expansion to memory. The latter two
multiply dense tiles, so an inf or NaN of the other operand reaches every result of its column, as in a dense GEMM; the kernel for a few
tokens does not. Indices are not checked, which would synchronise; a value with an out-of-range index is left out.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...pattern import Pattern
from ...reference.linear import ACTIVATIONS
from ..shared import contiguous
from .compress import decompress
from .launch import capability, cdiv, launch
from .launches import Plan, by_words, choose
from .spmm import combine_kernel, few_kernel, spmm_kernel, spmm_transposed_kernel

FEW_ROWS, FEW_WIDTH = 8, 128
"""Rows per program of ``few_kernel``, and stored values read at a time: 16 bytes per thread for 16-bit numbers."""

COMBINE = 1024
"""Results per program of ``combine_kernel``."""


def matrix(x: Tensor) -> Tensor:
    """``x`` as a matrix with its leading dimensions flattened; copies only if strides or a pending negation require it."""
    x = x.resolve_neg() if x.is_neg() else x
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def packed(values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The compressed operand with contiguous rows."""
    return contiguous(values), indices.contiguous()


def _expands(p: Plan, values: Tensor, indices: Tensor, n: int, m: int, cols: int) -> bool:
    """Whether the operand can be expanded in registers, which needs aligned group values and 4-byte aligned indices."""
    if p.method != "gemm" or not by_words(values.dtype, n, m, cols):
        return False
    return not (values.data_ptr() % (n * values.element_size()) or indices.data_ptr() & 3)


class Call(NamedTuple):
    """Launch parameters other than tensors and strides."""

    programs: int
    groups: int
    index_row: int
    constexprs: dict[str, Any]


@lru_cache(maxsize=4096)
def _call(p: Plan, rows: int, cols: int, width: int, n: int, m: int, activation: str | None) -> Call:
    """The launch parameters of ``spmm_kernel``, or of ``spmm_transposed_kernel`` if ``activation`` is None."""
    pattern, groups, tile = Pattern(n, m), cdiv(cols, m), max(1, p.cols // m)
    consts: dict[str, Any] = {"N": n, "M": m, "BITS": pattern.index_bits, "ROWS": p.rows, "COLS": p.width, "GROUPS": tile}
    consts |= {"EVEN": min(16, groups & -groups) or 16, "enable_fp_fusion": True}
    if activation is None:
        consts["WHOLE"] = groups % tile == 0 and rows % p.rows == 0
        programs = cdiv(width, p.width) * cdiv(groups, tile)
    else:
        consts |= {
            "WHOLE": cols == groups * m and groups % tile == 0,
            "SPLITS": p.splits,
            "ACTIVATION": activation if p.splits == 1 else "",
        }
        programs = cdiv(rows, p.rows) * cdiv(width, p.width) * p.splits
    return Call(programs, groups, pattern.index_bytes(cols), consts)


def _spmm(
    p: Plan, values: Tensor, indices: Tensor, n: int, m: int, cols: int, b: Tensor, by: tuple[int, ...],
    bias: Tensor | None, activation: str, c: Tensor, to: tuple[int, ...],
) -> None:  # fmt: skip
    """c = activation(E b + bias); ``by`` and ``to`` are the strides of b ``[cols, width]`` and of c ``[rows, width]``."""
    rows, count, whole = values.shape[0], c.numel(), p.splits == 1
    width = count // rows
    call = _call(p, rows, cols, width, n, m, activation)
    sums = c if whole else c.new_empty(p.splits, count, dtype=torch.float32)
    args = (values, indices, b, bias if whole else None, sums, rows, cols, width, call.groups, call.index_row, *by, *to)
    launch(spmm_kernel, call.programs, args, p.warps, p.stages, **call.constexprs)
    if not whole:
        consts: dict[str, Any] = {"SPLITS": p.splits, "ACTIVATION": activation, "TILE": COMBINE, "enable_fp_fusion": True}
        launch(combine_kernel, cdiv(count, COMBINE), (sums, bias, c, count, rows), **consts)


def _deliver(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)


def linear(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = "",
    residual: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    rows, flat = values.shape[0], matrix(x)
    values, indices = packed(values, indices)
    p = choose("fprop", x.dtype, rows, cols, flat.shape[0], n, m, x.device, capability(x))
    if p.method != "few" and not _expands(p, values, indices, n, m, cols):
        y = F.linear(x, decompress(values, indices, n, m, cols), bias)
        y = _deliver(ACTIVATIONS[activation](y), out)
    else:
        y = x.new_empty(*x.shape[:-1], rows) if out is None else out
        b = None if bias is None else contiguous(bias)
        if y.numel() and p.method == "few":
            pattern = Pattern(n, m)
            args = (flat.contiguous(), values, indices, b, y, rows, cols, pattern.kept(cols), pattern.index_bytes(cols))
            consts: dict[str, Any] = {"N": n, "M": m, "BITS": pattern.index_bits, "TOKENS": y.numel() // rows, "ACTIVATION": activation}
            launch(few_kernel, cdiv(rows, FEW_ROWS), args, **consts, ROWS=FEW_ROWS, WIDTH=FEW_WIDTH, enable_fp_fusion=True)
        elif y.numel():
            _spmm(p, values, indices, n, m, cols, flat, (flat.stride(1), flat.stride(0)), b, activation, y, (1, rows))
    return y if residual is None else y.add_(residual)


def linear_dgrad(g: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, out: Tensor | None = None) -> Tensor:
    rows, flat = values.shape[0], matrix(g)
    tokens = flat.shape[0]
    values, indices = packed(values, indices)
    p = choose("dgrad", g.dtype, rows, cols, tokens, n, m, g.device, capability(g))
    if not _expands(p, values, indices, n, m, cols):
        return _deliver(g @ decompress(values, indices, n, m, cols), out)
    dx = g.new_empty(*g.shape[:-1], cols) if out is None else out
    if dx.numel():
        call = _call(p, rows, cols, tokens, n, m, None)
        args = (values, indices, flat, dx, rows, cols, tokens, call.groups, call.index_row, *flat.stride())
        launch(spmm_transposed_kernel, call.programs, args, p.warps, p.stages, **call.constexprs)
    return dx


def linear_wgrad(values: Tensor, indices: Tensor, n: int, m: int, cols: int, x: Tensor, out: Tensor | None = None) -> Tensor:
    rows, width = values.shape[0], x.shape[1]
    values, indices = packed(values, indices)
    p = choose("wgrad", x.dtype, rows, cols, width, n, m, x.device, capability(x))
    if not _expands(p, values, indices, n, m, cols):
        return _deliver(decompress(values, indices, n, m, cols) @ x, out)
    dw = x.new_empty(rows, width) if out is None else out
    if dw.numel():
        x = matrix(x)
        _spmm(p, values, indices, n, m, cols, x, x.stride(), None, "", dw, (width, 1))
    return dw
