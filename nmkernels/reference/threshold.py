"""S-STE's continuous projection onto N:M: a soft threshold per group, and its scale per tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from .common import check, chunked_sum, compute_dtype, grouped, magnitude_keys


def soft_threshold(w: Tensor, n: int, m: int) -> Tensor:
    """Shrink every group by its (n+1)-th largest magnitude t: S_i = sign(w_i) max(|w_i| - t, 0).

    At most n results of a group are non-zero, and S is continuous in w: where two magnitudes swap ranks n and n+1,
    both results are 0. t is 0 for n = m. t follows ``mask``'s order (NaN above everything); |w_i| - t is taken in the compute
    dtype, and NaN where either is NaN or both are infinite. Zero results are +0.0.

    Hu, Zhu, Chen, "S-STE: Continuous Pruning Function for Efficient 2:4 Sparse Pre-training", NeurIPS 2024
    (2:4; general n:m is ours). Shapes and errors as ``mask``.

    Example:
        >>> soft_threshold(torch.tensor([0.3, -1.0, 0.5, 2.0]), 2, 4)
        tensor([ 0.0000, -0.5000,  0.0000,  1.5000])
    """
    check("soft_threshold", w, n, m)
    groups = grouped(w.contiguous(), m).to(compute_dtype(w.dtype))
    magnitudes = groups.abs()
    if n == m:
        t = torch.zeros_like(magnitudes[..., :1])
    else:
        order = grouped(magnitude_keys(w), m).sort(dim=-1, descending=True, stable=True).indices
        t = magnitudes.gather(-1, order[..., n : n + 1])
    d = magnitudes - t
    return torch.where(d <= 0, 0.0, d.copysign(groups)).to(w.dtype).flatten(-2)


def soft_threshold_scale(w: Tensor, n: int, m: int) -> Tensor:
    """The scale beta that brings S = ``soft_threshold(w)`` closest to w: beta = <w, S> / ||S||² = argmin ||w - beta S||².

    Products, both sums (``chunked_sum``) and the quotient are in float64; S is first rounded to w's dtype, as
    ``soft_threshold`` returns it. S-STE takes it once at initialisation and freezes it.

    Returns:
        0-d float32 (float64 for float64); 0 when S is all zero, an empty tensor included. Errors as ``mask``.

    Example:
        >>> soft_threshold_scale(torch.tensor([0.3, -1.0, 0.5, 2.0]), 2, 4)
        tensor(1.4000)
    """
    check("soft_threshold_scale", w, n, m)
    s, wide = soft_threshold(w, n, m).double(), w.double()
    square = chunked_sum(s * s)
    return torch.where(square == 0, 0.0, chunked_sum(wide * s) / square).to(compute_dtype(w.dtype))
