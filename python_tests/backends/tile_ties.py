"""Weights whose tiles have many best masks, for the tests of both GPU backends."""

from __future__ import annotations

import torch
from torch import Tensor

INF, NAN = float("inf"), float("nan")


def picked(options: list[float], dtype: torch.dtype) -> Tensor:
    """256 tiles of these magnitudes, in both signs."""
    signed = torch.tensor([*options, *(-x for x in options)], dtype=torch.float64).to(dtype)
    return signed[torch.randint(len(signed), (8, 512))]


def ties_and_roundings(dtype: torch.dtype) -> Tensor:
    """Tiles where many masks tie, some only after rounding, and where sums overflow or hold NaN and infinity."""
    info = torch.finfo(dtype)
    options: list[list[float]] = [
        [0, 1],
        [1, 2, 3],
        [1, 1 + info.eps, 0.5, 3],
        [1, 2**-12, 2**-24, 2**-23, 2**12],
        [0, info.smallest_normal / 4, info.smallest_normal * 3 / 4, info.smallest_normal],
        [info.max, info.max / 2, info.max / 4, 0, 1],
        [info.max, 1, INF, NAN],
        [INF, 1, 2],
        [NAN, 1, 2],
        [NAN, INF, 0],
    ]
    return torch.cat([picked(each, dtype) for each in options])
