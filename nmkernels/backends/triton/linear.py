"""The three GEMMs of a linear layer with one compressed operand: fprop nt, dgrad nn, wgrad tn.

``launches`` chooses between a kernel for a few tokens, expansion in registers tile by tile, and expansion to memory. The latter two
multiply dense tiles, so an inf or NaN of the other operand reaches every result of its column, as in a dense GEMM; the kernel for a few
tokens does not. Indices are not checked, which would synchronise; a value with an out-of-range index is left out.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...pattern import Pattern
from ...reference.linear import ACTIVATIONS
from ..shared import contiguous, product
from .compress import decompress
from .launch import capability, cdiv, launch, next_power_of_2
from .launches import Tiling, by_words, choose
from .spmm import combine_kernel, few_kernel, spmm_kernel, spmm_transposed_kernel

FEW_ROWS, FEW_WIDTH = 8, 128
"""Rows per program of ``few_kernel``, and stored values read at a time: 16 bytes per thread for 16-bit numbers."""

FEW_INTEGERS = 256
"""Integers read at a time for one token, 16 bytes per thread at 8 bits; fewer for more tokens, whose products take registers."""

COMBINE = 1024
"""Results per program of ``combine_kernel``."""


def matrix(x: Tensor) -> Tensor:
    """``x`` as a matrix with its leading dimensions flattened; copies only if strides or a pending negation require it."""
    x = x.resolve_neg() if x.is_neg() else x
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _expands(p: Tiling, values: Tensor, indices: Tensor, n: int, m: int, cols: int) -> bool:
    """Whether the operand can be expanded in registers, which needs aligned group values and 4-byte aligned indices."""
    if p.method != "gemm" or not by_words(values.dtype, n, m, cols):
        return False
    return not (values.data_ptr() % (n * values.element_size()) or indices.data_ptr() & 3)


@lru_cache(maxsize=4096)
def _call(p: Tiling, rows: int, cols: int, width: int, n: int, m: int, activation: str | None, value: int = 16) -> tuple[Any, ...]:
    """Programs, groups, index bytes of a row and constexprs of ``spmm_kernel``, or of ``spmm_transposed_kernel`` if ``activation`` is None.

    ``value``: bits of a value.
    """
    pattern, groups, tile = Pattern(n, m), cdiv(cols, m), max(1, p.cols // m)
    consts: dict[str, Any] = {"N": n, "M": m, "BITS": pattern.index_bits, "ROWS": p.rows, "COLS": p.width, "GROUPS": tile}
    consts |= {"EVEN": min(16, groups & -groups) or 16, "enable_fp_fusion": True}
    if activation is None:
        consts["WHOLE"] = groups % tile == 0 and rows % p.rows == 0
        programs = cdiv(width, p.width) * cdiv(groups, tile)
    else:
        consts |= {"WHOLE": cols == groups * m and groups % tile == 0, "VALUE": value, "SPLITS": p.splits}
        consts["ACTIVATION"] = activation if p.splits == 1 else ""
        programs = cdiv(rows, p.rows) * cdiv(width, p.width) * p.splits
    return programs, groups, pattern.index_bytes(cols), consts


def few(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None, activation: str, y: Tensor,
    step: Tensor | None = None,
) -> None:  # fmt: skip
    """y = activation(x Eᵀ + bias) for at most ``FEW_TOKENS`` tokens, all operands contiguous; with steps, values are integers."""
    p, rows, tokens = Pattern(n, m), values.shape[0], y.numel() // values.shape[0]
    stored, steps, width, run, runs = p.kept(cols), 1, FEW_WIDTH, 1, 1
    if step is not None:
        steps, width = step.shape[1], FEW_INTEGERS // next_power_of_2(tokens)
        run, runs = runs_of(stored, steps, width)
    args = (x, values, indices, step, bias, y, rows, cols, stored, values.shape[1], p.index_bytes(cols), steps, runs)
    consts: dict[str, Any] = {"N": n, "M": m, "BITS": p.index_bits, "TOKENS": tokens, "ACTIVATION": activation}
    launch(few_kernel, cdiv(rows, FEW_ROWS), args, **consts, ROWS=FEW_ROWS, WIDTH=width, RUN=run, enable_fp_fusion=True)


def runs_of(stored: int, steps: int, width: int) -> tuple[int, int]:
    """(RUN, runs) of ``load_integers``: neighbours in a tile of ``width`` values that share a step, and how many such runs share it."""
    if steps == 1:
        return width, max(1, cdiv(stored, width))
    per = stored // steps
    run = min(width, per & -per)
    return run, per // run


def spmm(
    p: Tiling, values: Tensor, indices: Tensor, n: int, m: int, cols: int, b: Tensor, by: tuple[int, ...],
    bias: Tensor | None, activation: str, c: Tensor, to: tuple[int, ...], step: Tensor | None = None,
) -> None:  # fmt: skip
    """c = activation(E b + bias); ``by`` and ``to`` are the strides of b ``[cols, width]`` and of c ``[rows, width]``.

    With steps, values are integers, and ``p.cols`` divides the columns of a step.
    """
    rows, count, single = values.shape[0], c.numel(), p.splits == 1
    width, steps = count // rows, 1 if step is None else step.shape[1]
    value = 16 if step is None else 8 if values.dtype == torch.int8 else 4
    programs, groups, index_row, consts = _call(p, rows, cols, width, n, m, activation, value)
    sums = c if single else c.new_empty(p.splits, count, dtype=torch.float32)
    run = 1 if step is None else cdiv(groups, consts["GROUPS"]) // steps
    args = (values, indices, step, b, bias if single else None, sums, rows, cols, width, groups, index_row, *by, *to, steps, run)
    launch(spmm_kernel, programs, args, p.warps, p.stages, **consts)
    if not single:
        consts = {"SPLITS": p.splits, "ACTIVATION": activation, "TILE": COMBINE, "enable_fp_fusion": True}
        launch(combine_kernel, cdiv(count, COMBINE), (sums, bias, c, count, rows), **consts)


def linear(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = "",
    residual: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    rows, flat = values.shape[0], matrix(x)
    values, indices = contiguous(values), indices.contiguous()
    p = choose("fprop", x.dtype, rows, cols, flat.shape[0], n, m, x.device, capability(x))
    if p.method != "few" and not _expands(p, values, indices, n, m, cols):
        y = F.linear(x, decompress(values, indices, n, m, cols), bias)
        y = ACTIVATIONS[activation](y)
        y = y if out is None else out.copy_(y)
    else:
        y = x.new_empty(*x.shape[:-1], rows) if out is None else out
        b = None if bias is None else contiguous(bias)
        if y.numel() and p.method == "few":
            few(flat.contiguous(), values, indices, n, m, cols, b, activation, y)
        elif y.numel():
            spmm(p, values, indices, n, m, cols, flat, (flat.stride(1), flat.stride(0)), b, activation, y, (1, rows))
    return y if residual is None else y.add_(residual)


def linear_dgrad(g: Tensor, values: Tensor, indices: Tensor, n: int, m: int, cols: int, out: Tensor | None = None) -> Tensor:
    rows, flat = values.shape[0], matrix(g)
    tokens = flat.shape[0]
    values, indices = contiguous(values), indices.contiguous()
    p = choose("dgrad", g.dtype, rows, cols, tokens, n, m, g.device, capability(g))
    if not _expands(p, values, indices, n, m, cols):
        dx = g @ decompress(values, indices, n, m, cols)
        return dx if out is None else out.copy_(dx)
    dx = g.new_empty(*g.shape[:-1], cols) if out is None else out
    if dx.numel():
        programs, groups, index_row, consts = _call(p, rows, cols, tokens, n, m, None)
        args = (values, indices, flat, dx, rows, cols, tokens, groups, index_row, *flat.stride())
        launch(spmm_transposed_kernel, programs, args, p.warps, p.stages, **consts)
    return dx


def linear_wgrad(
    values: Tensor, indices: Tensor, n: int, m: int, cols: int, x: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    rows, width = values.shape[0], x.shape[1]
    values, indices = contiguous(values), indices.contiguous()
    p = choose("wgrad", x.dtype, rows, cols, width, n, m, x.device, capability(x))
    if not _expands(p, values, indices, n, m, cols):
        dense = decompress(values, indices, n, m, cols)
        if out_dtype is not None and not x.is_cuda:  # product would round
            dense, x = dense.to(out_dtype), x.to(out_dtype)
        dw = product(dense, x, out_dtype)
        return dw if out is None else out.copy_(dw)
    dw = x.new_empty(rows, width, dtype=out_dtype or x.dtype) if out is None else out
    if dw.numel():
        x = matrix(x)
        spmm(p, values, indices, n, m, cols, x, x.stride(), None, "", dw, (width, 1))
    return dw
