"""What is done to a sum of products before it is stored: parts are added, and the activation applied, in float32, to be rounded once."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ._groups import narrow, widen
from ._launch import cdiv, launch

ACTIVATIONS = ("", "gelu", "silu", "relu2")
"""Names that ``activate`` takes: none, GELU (erf), SiLU, squared ReLU."""

COMBINE = 1024
"""Results of one program that adds up parts."""


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


def combine(parts: Tensor, bias: Tensor | None, y: Tensor, width: int, activation: str) -> None:
    """y ``[count]``, rows of ``width``, from float32 parts ``[splits, count]``: ``combine_kernel``."""
    count = y.numel()
    consts: dict[str, Any] = {"SPLITS": parts.shape[0], "ACTIVATION": activation, "TILE": COMBINE, "enable_fp_fusion": True}
    launch(combine_kernel, cdiv(count, COMBINE), (parts, bias, y, count, width), **consts)
