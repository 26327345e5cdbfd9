"""How far a result is from another one, piece by piece, so that a product of gigabytes is not copied in float64 as a whole."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1 << 24
"""Elements that are compared at once."""


def distance(y: Tensor, z: Tensor) -> float:
    """The largest |y − z| of two matrices of one shape, in float64; NaN where either has one, 0 for empty ones.

    Example:
        >>> distance(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, -0.5]]))
        2.5
    """
    if not y.numel():
        return 0.0
    step = max(1, CHUNK // y.shape[1])
    return float(torch.stack([(y[i : i + step].double() - z[i : i + step]).abs().max() for i in range(0, len(y), step)]).max())
