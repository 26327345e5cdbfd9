"""Weights whose kept values are small integers with a step: rounding to 8 or 4 bits, decoding, and the linear layer.

A row of kept values is divided into equal runs, each with a step in bf16; a weight is integer · step. 8 bits are stored as int8, 4 bits as
uint8, two to a byte, the earlier one low, in two's complement, each row starting on a byte, a spare half 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..pattern import Pattern
from .common import compute_dtype
from .linear import linear

LARGEST = {8: 127, 4: 7}
"""The largest integer by bits; the smallest is −127 or −8."""
PLAIN, SIGNED = range(20, 43), range(24, 43)
"""Fortieths of the largest magnitude that the search at 4 bits sets to 7, or with its sign to −8."""


def quantize_values(values: Tensor, bits: int, steps: int) -> tuple[Tensor, Tensor]:
    """Round kept values ``(..., kept)`` to integers with ``steps`` steps per row: (integers, steps ``(..., steps)`` in bf16).

    8 bits: step = bf16(max|w| / 127), q = w / step rounded half to even, from −127 to 127. 4 bits: of 42 steps, bf16(f·max|w| / 7) for f in
    ``PLAIN``/40 and bf16(−f·w* / 8) for f in ``SIGNED``/40, w* the first of largest magnitude, the first with the smallest
    Σ (w − q·step)², added in order in fp32; q from −8 to 7. All in fp32, each operation rounded. A run of zeros has step 0; one with a
    value that is not finite has step NaN and integers 0.
    """
    w = values.float().unflatten(-1, (steps, -1)) if steps else values.float().unsqueeze(-1)
    size = w.abs().amax(-1, keepdim=True) if w.shape[-1] else w.new_zeros(*w.shape[:-1], 1)
    finite = w.isfinite().all(-1, keepdim=True)
    if bits == 8:
        step = _over(size, LARGEST[8]).bfloat16()
        integers = _rounded(w, step, -LARGEST[8], LARGEST[8])
    else:
        step, integers = _searched(w, size)
    step = step.masked_fill(size == 0, 0.0).masked_fill(~finite, torch.nan)
    integers = integers.masked_fill(step.eq(0) | ~finite, 0.0).flatten(-2).reshape(values.shape)
    return pack_integers(integers.to(torch.int8), bits), step.squeeze(-1)


def candidates(first: Tensor) -> list[Tensor]:
    """The 42 steps that are tried at 4 bits for runs whose first value of largest magnitude is ``first``."""
    plain = [_over(first.abs() * (f / 40), LARGEST[4]).bfloat16() for f in PLAIN]
    return plain + [_over(-first * (f / 40), 8).bfloat16() for f in SIGNED]


def _searched(w: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    steps = candidates(w.gather(-1, w.abs().argmax(-1, keepdim=True)) if w.shape[-1] else size)
    best, least = steps[0], torch.full_like(size, torch.inf)
    for step in steps:
        d = w - _rounded(w, step, -8, LARGEST[4]) * step.float()
        error = torch.zeros_like(size[..., 0])
        for square in (d * d).unbind(-1):
            error = error + square
        better = error.unsqueeze(-1) < least
        best, least = torch.where(better, step, best), torch.where(better, error.unsqueeze(-1), least)
    return best, _rounded(w, best, -8, LARGEST[4])


def _over(w: Tensor, divisor: int) -> Tensor:
    """w / divisor, rounded; by a Python number CUDA would multiply by the reciprocal."""
    return w / torch.full((), float(divisor), device=w.device)


def _rounded(w: Tensor, step: Tensor, low: int, high: int) -> Tensor:
    return (w / step.float()).nan_to_num(0.0, high, low).round().clamp(low, high)


def pack_integers(integers: Tensor, bits: int) -> Tensor:
    """int8 ``(..., count)`` as stored: itself, or at 4 bits uint8 ``(..., ⌈count/2⌉)``."""
    if bits == 8:
        return integers.contiguous()
    halves = F.pad(integers.view(torch.uint8) & 15, (0, integers.shape[-1] % 2)).unflatten(-1, (-1, 2))
    return halves[..., 0] | halves[..., 1] << 4


def unpack_integers(stored: Tensor, count: int) -> Tensor:
    """The inverse of ``pack_integers``: int8 ``(..., count)``."""
    if stored.dtype == torch.int8:
        return stored
    # shifts of int8 extend the sign
    return torch.stack([(stored << 4).view(torch.int8) >> 4, stored.view(torch.int8) >> 4], -1).flatten(-2)[..., :count]


def dequantize_values(values: Tensor, step: Tensor, kept: int, dtype: torch.dtype) -> Tensor:
    """The weights integer · step ``(..., kept)``: exact in fp32, then rounded once to ``dtype``."""
    integers, steps = unpack_integers(values, kept).float(), step.shape[-1]
    if not steps:
        return integers.to(dtype)
    return (integers.unflatten(-1, (steps, -1)) * step.float().unsqueeze(-1)).flatten(-2).to(dtype)


def linear_integers(
    x: Tensor, values: Tensor, indices: Tensor, step: Tensor, n: int, m: int, cols: int, bias: Tensor | None = None, activation: str = "",
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y = f(x Wᵀ + b) + r with the decoded weight W, multiplied in fp32, which has it exactly; rounded once, at the end."""
    wide = compute_dtype(x.dtype)
    weight = dequantize_values(values, step, Pattern(n, m).kept(cols), wide)
    extras = (None if extra is None else extra.to(wide) for extra in (bias, residual))
    if m == 1:  # there are no indices; with them, each would be 0
        indices = indices.new_zeros(values.shape[0], Pattern(n, m).index_bytes(cols))
    return linear(x.to(wide), weight, indices, n, m, cols, next(extras), activation, next(extras)).to(x.dtype)
