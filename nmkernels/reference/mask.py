"""The N:M mask (the N largest magnitudes of every group of M), and S-STE's soft threshold, a continuous projection onto N:M."""

from __future__ import annotations

import torch
from torch import Tensor

from .common import chunked_sum, compute_dtype, grouped, magnitude_keys


def mask(w: Tensor, n: int, m: int) -> Tensor:
    """Mark the ``n`` largest magnitudes of every group of ``m``: M_i = 1 iff fewer than n elements rank above i.

    Element j ranks above i iff |w_j| > |w_i|, or |w_j| = |w_i| and j < i. -0.0 equals 0.0; a NaN ranks above everything and NaNs tie.
    """
    keys = grouped(magnitude_keys(w), m)
    largest = keys.sort(dim=-1, descending=True, stable=True).indices[..., :n]
    return torch.zeros(keys.shape, dtype=torch.bool, device=w.device).scatter_(-1, largest, True).flatten(-2)


def prune(w: Tensor, n: int, m: int) -> Tensor:
    """Keep every element that ``mask`` marks, bit for bit, and set the others to +0.0: out = w where M else +0.0.

    It selects instead of multiplying, so a pruned NaN or infinity becomes 0.
    """
    return w.contiguous().masked_fill(~mask(w, n, m), 0.0)


def is_nm(w: Tensor, n: int, m: int) -> bool:
    """Whether every group of ``m`` has at most ``n`` non-zeros; NaN counts as non-zero, -0.0 as zero."""
    return bool((grouped(w != 0, m).sum(-1) <= n).all())


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
    """The scale that makes beta · S closest to w, S = ``soft_threshold(w)``: beta = <w, S> / ||S||², 0 if S is zero.

    S is rounded to w's dtype; products, both sums (``chunked_sum``) and the quotient are in float64.
    """
    s, wide = soft_threshold(w, n, m).double(), w.double()
    square = chunked_sum(s * s)
    return torch.where(square == 0, 0.0, chunked_sum(wide * s) / square).to(compute_dtype(w.dtype))
