"""What is done to a sum of products before it is stored: the activation, in float32, so that the result is rounded once."""

from __future__ import annotations

import triton
import triton.language as tl

from ._groups import narrow, widen

ACTIVATIONS = ("", "gelu", "silu", "relu2")
"""Names that ``activate`` takes: none, GELU (erf), SiLU, squared ReLU."""


@triton.jit
def activate(y, ACTIVATION: tl.constexpr):
    """The activation of float32 ``y``; NaN and inf come out as from torch's own."""
    tl.static_assert(ACTIVATION == "" or ACTIVATION == "gelu" or ACTIVATION == "silu" or ACTIVATION == "relu2")
    if ACTIVATION == "gelu":
        return 0.5 * y * (1.0 + tl.erf(y * 0.70710678118654752))
    elif ACTIVATION == "silu":
        return y / (1.0 + tl.exp(-y))
    elif ACTIVATION == "relu2":
        positive = tl.where(y <= 0.0, 0.0, y)  # not a maximum, which loses NaN
        return positive * positive
    else:
        return y


@triton.jit
def combine_kernel(parts, bias, y, count, width, SPLITS: tl.constexpr, ACTIVATION: tl.constexpr, TILE: tl.constexpr):
    """y = activation(bias + the sum of ``parts`` ``[SPLITS, count]`` in their order); bias is one number a column of ``width``."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < count
    sums = tl.load(parts + at, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        sums += tl.load(parts + split * tl.cast(count, tl.int64) + at, mask=inside, other=0.0)
    if bias is not None:
        sums += widen(tl.load(bias + at % width, mask=inside, other=0.0))
    tl.store(y + at, narrow(activate(sums, ACTIVATION), y.dtype.element_ty), mask=inside)
