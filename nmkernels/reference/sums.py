"""Sums over a whole tensor whose order of additions is fixed."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 4096
"""Elements in one partial sum."""


def chunked_sum(x: Tensor) -> Tensor:
    """Sum every element in float64: partials over 4096-element chunks of the row-major flattening, added in order.

    sum = ((c_0 + c_1) + c_2) + ..., c_k = ((x_{4096k} + x_{4096k+1}) + ...), each addition rounded once in float64.

    Args:
        x: any shape and strides, a float dtype.

    Returns:
        0-d float64; 0 for an empty tensor.

    Example:
        >>> chunked_sum(torch.ones(2, 5000))
        tensor(10000., dtype=torch.float64)
    """
    flat = x.reshape(-1).to(torch.float64)
    # cumsum adds from left to right; a zero in front changes no sum and gives the empty tensor a last element.
    whole, rest = flat[: flat.numel() // CHUNK * CHUNK], flat[flat.numel() // CHUNK * CHUNK :]
    partials = whole.view(-1, CHUNK).cumsum(-1)[:, -1] if whole.numel() else whole
    last = rest.cumsum(0)[-1:]
    return torch.cat([flat.new_zeros(1), partials, last]).cumsum(0)[-1]
