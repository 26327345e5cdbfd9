"""Shared helpers: the compute dtype, groups as a last axis, the order of magnitudes, sums in a fixed order, distances."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that arithmetic runs in: float64 for float64, else float32 (results are rounded once)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def grouped(x: Tensor, m: int) -> Tensor:
    """View ``[..., cols]`` as ``[..., cols / m, m]``."""
    return x.unflatten(-1, (x.shape[-1] // m, m))


def magnitude_keys(w: Tensor) -> Tensor:
    """Integers in the order of the magnitudes of ``w``, with all NaNs equal and above infinity.

    The bits of non-negative IEEE numbers, read as integers, have the order of the numbers; so the sign bit is cleared (-0.0 equals 0.0) and
    everything above infinity becomes one value.
    """
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[w.element_size()]
    infinity = int(torch.tensor(float("inf"), dtype=w.dtype).view(ints))
    return (w.resolve_neg().view(ints) & torch.iinfo(ints).max).clamp_max(infinity + 1)


CHUNK = 4096
"""Elements in one partial sum."""


def chunked_sum(x: Tensor) -> Tensor:
    """Sum every element in float64, 0-d: partials over 4096-element chunks of the row-major flattening, added in order.

    sum = ((c_0 + c_1) + c_2) + ..., c_k = ((x_{4096k} + x_{4096k+1}) + ...), each addition rounded once in float64.
    """
    flat = x.reshape(-1).to(torch.float64)
    # cumsum adds from left to right; a leading zero changes no sum and gives an empty tensor a last element
    chunks, rest = flat[: flat.numel() // CHUNK * CHUNK], flat[flat.numel() // CHUNK * CHUNK :]
    partials = chunks.view(-1, CHUNK).cumsum(-1)[:, -1] if chunks.numel() else chunks
    last = rest.cumsum(0)[-1:]
    return torch.cat([flat.new_zeros(1), partials, last]).cumsum(0)[-1]


WINDOW = 1 << 24
"""Elements compared at a time."""


def distance(y: Tensor, z: Tensor) -> float:
    """The largest |y − z| of two matrices of one shape, in float64 and in pieces; NaN if either has one, 0 if they are empty."""
    if not y.numel():
        return 0.0
    step = max(1, WINDOW // y.shape[1])
    return float(torch.stack([(y[i : i + step].double() - z[i : i + step]).abs().max() for i in range(0, len(y), step)]).max())
