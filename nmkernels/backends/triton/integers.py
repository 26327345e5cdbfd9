"""Compressed weights whose values are integers: rounding to them and back, bit-equal to the reference, and the linear layer.

Products of up to ``MOST`` tokens read the stored integers; for more, values are decoded once and ``linear`` multiplies them. What an inf or
NaN of x reaches is as in ``linear``. On tensor cores sums are scaled after multiplying integers, so x above 2¹¹⁰ or so may overflow.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...pattern import Pattern
from ..shared import contiguous
from .compress import as_integers
from .groups import bits_of, narrow, widen
from .launch import capability, cdiv, launch, next_power_of_2
from .launches import FEW_TOKENS, Tiling, plan, word_cols
from .linear import few, linear, matrix, runs_of, spmm
from .spmm import load_integers

MOST = 16
"""Tokens up to which stored integers are multiplied."""

ELEMENTS = 2048
"""Values per program of ``dequantize_kernel``: 16 bytes of int8 per thread."""

BYTES = 1024
"""Stored bytes per program of ``quantize_kernel``."""

RUNS, WIDTH = 8, 64
"""Runs per program of ``steps_kernel``, and values of a run read at a time."""


@triton.jit
def dequantize_kernel(
    values, step, out, rows, kept, stored, steps, runs, blocks, ROWS: tl.constexpr, WIDTH: tl.constexpr, RUN: tl.constexpr
):  # fmt: skip
    """out ``[rows, kept]`` = integer · step, exact in float32, rounded once."""
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(0) % blocks * WIDTH
    w = load_integers(values, step, tl.minimum(row, rows - 1), first, stored, steps, runs, WIDTH, RUN)
    at = (first + tl.arange(0, WIDTH))[:, None]
    tl.store(out + row[None, :] * kept + at, narrow(w, out.dtype.element_ty), mask=(at < kept) & (row < rows)[None, :])


def dequantize_values(values: Tensor, step: Tensor, kept: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    values, step = values.contiguous(), contiguous(step)
    result = values.new_empty((*values.shape[:-1], kept), dtype=dtype) if out is None else out
    rows, steps, width = values.shape[:-1].numel(), step.shape[-1], min(ELEMENTS, max(16, next_power_of_2(kept)))
    run, runs = runs_of(kept, steps, width)
    high, blocks = ELEMENTS // width, cdiv(kept, width)
    args = (values, step, result, rows, kept, values.shape[-1], steps, runs, blocks)
    launch(dequantize_kernel, cdiv(rows, high) * blocks, args, ROWS=high, WIDTH=width, RUN=run)
    return result


@triton.jit
def rounded(w, step, LOW: tl.constexpr, HIGH: tl.constexpr):
    """w / step rounded to an integer from LOW to HIGH, half to even; 0 for NaN."""
    q = tl.div_rn(w, step)
    q = tl.where(q < LOW, LOW, tl.where(q > HIGH, HIGH, q))
    # at 1.5 · 2²³ the last bit of a float32 is 1
    return tl.where(q == q, (q + 12582912.0) - 12582912.0, 0.0)


@triton.jit
def steps_kernel(w, step, runs, per, BITS: tl.constexpr, RUNS: tl.constexpr, WIDTH: tl.constexpr):
    """The steps of runs of ``per`` values, as the bits of bfloat16; at 4 bits the best of 42 candidates, as the reference defines them."""
    run = tl.program_id(0).to(tl.int64) * RUNS + tl.arange(0, RUNS)
    at = w + tl.minimum(run, runs - 1) * per
    k = tl.arange(0, WIDTH)[None, :]
    size = tl.zeros([RUNS, 1], tl.float32)
    largest = tl.zeros([RUNS, 1], tl.float32)
    finite = tl.full([RUNS, 1], 1, tl.int32)
    for first in range(0, per, WIDTH):
        x = widen(tl.load(at[:, None] + first + k, mask=first + k < per, other=0.0))
        is_finite = tl.abs(x) < float("inf")
        finite = tl.minimum(finite, tl.min(is_finite.to(tl.int32), 1, keep_dims=True))
        x = tl.where(is_finite, x, 0.0)
        most = tl.max(tl.abs(x), 1, keep_dims=True)
        # at most one element is non-zero, so this sum is a copy
        earliest = tl.min(tl.where(tl.abs(x) == most, k, WIDTH), 1, keep_dims=True)
        largest = tl.where(most > size, tl.sum(tl.where(k == earliest, x, 0.0), 1, keep_dims=True), largest)
        size = tl.maximum(size, most)
    if BITS == 8:
        bits = bits_of(narrow(tl.div_rn(size, 127.0), tl.bfloat16))
    else:
        # fortieths from 20 to 42 of the largest magnitude become 7, then from 24 to 42 of the largest value −8
        c = tl.arange(0, 64)[None, :]
        factor = tl.div_rn(tl.where(c < 23, 20 + c, 1 + c).to(tl.float32), 40.0)
        candidates = narrow(tl.div_rn(tl.where(c < 23, size, -largest) * factor, tl.where(c < 23, 7.0, 8.0)), tl.bfloat16)
        tried = widen(candidates)
        error = tl.zeros([RUNS, 64], tl.float32)
        for i in range(per):
            x = widen(tl.load(at + i))[:, None]
            d = x - rounded(x, tried, -8, 7) * tried
            error += d * d
        error = tl.where((c < 42) & (error < float("inf")), error, float("inf"))
        best = tl.min(tl.where(error == tl.min(error, 1, keep_dims=True), c, 64), 1, keep_dims=True)
        bits = tl.sum(tl.where(c == best, bits_of(candidates).to(tl.int32), 0), 1, keep_dims=True)
    bits = tl.where(finite == 0, 0x7FC0, tl.where(size == 0.0, 0, bits.to(tl.int32)))
    tl.store(step + run[:, None], bits.to(tl.int16), mask=run[:, None] < runs)


@triton.jit
def integers_at(w, step, row, k, kept, steps, per, LOW: tl.constexpr, HIGH: tl.constexpr):
    """The integers of values k of rows ``row``; 0 past the end of a row, and where the step is 0 or NaN."""
    x = widen(tl.load(w + row * kept + k, mask=k < kept, other=0.0))
    s = widen(tl.load(step + row * steps + k // per, mask=k < kept, other=0.0))
    return tl.where((s == s) & (s != 0.0), rounded(x, s, LOW, HIGH), 0.0).to(tl.int32)


@triton.jit
def quantize_kernel(w, step, integers, count, kept, stored, steps, per, BITS: tl.constexpr, BYTES: tl.constexpr):
    """integers = w / step, in ``count`` bytes: one each, or at 4 bits two to a byte and rows that start on a byte."""
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    inside = at < count
    if BITS == 8:
        row, k = at // kept, at % kept
        byte = integers_at(w, step, row, tl.where(inside, k, kept), kept, steps, per, -127, 127).to(tl.int8)
    else:
        row, k = at // stored, tl.where(inside, at % stored * 2, kept)
        low = integers_at(w, step, row, k, kept, steps, per, -8, 7)
        high = integers_at(w, step, row, k + 1, kept, steps, per, -8, 7)
        byte = ((low & 15) | ((high & 15) << 4)).to(tl.uint8)
    tl.store(integers + at, byte, mask=inside)


def quantize_values(values: Tensor, bits: int, steps: int, out: None = None) -> tuple[Tensor, Tensor]:
    w, lead, stored = contiguous(values), values.shape[:-1], values.shape[-1]
    integers = w.new_empty((*lead, stored if bits == 8 else cdiv(stored, 2)), dtype=torch.int8 if bits == 8 else torch.uint8)
    step, runs, per = w.new_empty((*lead, steps), dtype=torch.bfloat16), lead.numel() * steps, stored // steps
    launch(steps_kernel, cdiv(runs, RUNS), (w, as_integers(step), runs, per), BITS=bits, RUNS=RUNS, WIDTH=WIDTH)
    args = (w, step, integers, integers.numel(), stored, integers.shape[-1], steps, per)
    launch(quantize_kernel, cdiv(integers.numel(), BYTES), args, BITS=bits, BYTES=BYTES)
    return integers, step


def linear_integers(
    x: Tensor, values: Tensor, indices: Tensor, step: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = "",
    residual: Tensor | None = None, out: None = None,
) -> Tensor:  # fmt: skip
    rows, flat = values.shape[0], matrix(x)
    tokens = flat.shape[0]
    values, indices, step = values.contiguous(), indices.contiguous(), contiguous(step)
    if tokens > MOST or not cols:
        # fp16 lacks the range of a step
        wide = torch.float32 if x.dtype == torch.float16 else x.dtype
        extras = [None if extra is None else extra.to(wide) for extra in (bias, residual)]
        decoded = dequantize_values(values, step, Pattern(n, m).kept(cols), wide)
        return linear(x.to(wide), decoded, indices, n, m, cols, extras[0], activation, extras[1]).to(x.dtype)
    y, bias = x.new_empty(*x.shape[:-1], rows), None if bias is None else contiguous(bias)
    p = _tiles(flat, values, indices, step, n, m, cols)
    if p is not None and y.numel():
        spmm(p, values, indices, n, m, cols, flat, (flat.stride(1), flat.stride(0)), bias, activation, y, (1, rows), step)
    elif y.numel():
        flat, to = flat.contiguous(), y.view(tokens, rows)
        for some in range(0, tokens, FEW_TOKENS):
            part = slice(some, some + FEW_TOKENS)
            few(flat[part], values, indices, n, m, cols, bias, activation, to[part], step)
    return y if residual is None else y.add_(residual)


def _tiles(x: Tensor, values: Tensor, indices: Tensor, step: Tensor, n: int, m: int, cols: int) -> Tiling | None:
    """The plan to expand integers in registers; None if there are few tokens, or groups, steps or addresses do not allow it."""
    p = plan("fprop", x.dtype, values.shape[0], cols, x.shape[0], n, m, capability(x))
    word = n if values.dtype == torch.int8 else max(1, n // 2)
    if p.method != "gemm" or values.data_ptr() % word or indices.data_ptr() & 3:
        return None
    # a tile of columns has one step
    width = p.cols if step.shape[1] == 1 else gcd(p.cols, cols // step.shape[1])
    return p._replace(cols=width) if width >= max(32, word_cols(n, m)) else None  # fewer columns tensor cores do not take
