"""S-STE's continuous projection onto N:M: a soft threshold per group, and its scale per tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from .common import chunked_sum, compute_dtype, grouped, magnitude_keys


def soft_threshold(w: Tensor, n: int, m: int) -> Tensor:
    """Shrink every group by its (n+1)-th largest magnitude t, 0 for n = m: S_i = sign(w_i) max(|w_i| - t, 0).

    At most n results of a group are non-zero, and S is continuous in w. t follows ``mask``'s order (NaN above everything); |w_i| - t is in
    the compute dtype, and NaN where either is NaN or both are infinite. Zero results are +0.0.

    Hu, Zhu, Chen, "S-STE: Continuous Pruning Function for Efficient 2:4 Sparse Pre-training", NeurIPS 2024 (2:4; general n:m is ours).
    """
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
    """The scale beta that brings S = ``soft_threshold(w)`` closest to w: beta = <w, S> / ||S||², 0 where S is zero.

    GEMMs, both sums (``chunked_sum``) and the quotient are in float64; S is first rounded to w's dtype.
    """
    s, wide = soft_threshold(w, n, m).double(), w.double()
    square = chunked_sum(s * s)
    return torch.where(square == 0, 0.0, chunked_sum(wide * s) / square).to(compute_dtype(w.dtype))
