"""soft_threshold and its scale: the continuous N:M projection of S-STE."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pattern import PatternLike
from .check import as_pattern, check_dense
from .define import Spec, define


def _soft_threshold(w: Tensor, n: int, m: int) -> tuple[Spec, ...]:
    check_dense("nm_soft_threshold", w, n, m)
    return ((w.shape, w.dtype),)


def _soft_threshold_scale(w: Tensor, n: int, m: int) -> tuple[Spec, ...]:
    check_dense("nm_soft_threshold_scale", w, n, m)
    return (((), torch.float64 if w.dtype == torch.float64 else torch.float32),)


_SCHEMA = "(Tensor w, int n, int m)"
nm_soft_threshold = define("nm_soft_threshold", _SCHEMA + " -> Tensor", _soft_threshold, outs=("out",), leading=("w",))
nm_soft_threshold_scale = define("nm_soft_threshold_scale", _SCHEMA + " -> Tensor", _soft_threshold_scale)


def soft_threshold(w: Tensor, pattern: PatternLike, out: Tensor | None = None) -> Tensor:
    """S-STE's continuous projection onto N:M: every magnitude of a group shrinks by the (N+1)-th largest.

    ``S(w)_i = sign(w_i) · max(|w_i| - t, 0)``, t the (N+1)-th largest magnitude of the group (0 when N = M);
    at most N per group are non-zero (S-STE, Hu et al. 2024, arXiv 2409.09099). It is not scaled: see ``soft_threshold_scale``.

    Args:
        w: weights ``(..., in)``; any strides.
        pattern: ``"N:M"`` or a ``Pattern``.
        out: tensor of w's shape and dtype to write into.

    Returns:
        the shape and dtype of ``w``, contiguous. It has no gradient: backward through it raises.

    Raises:
        ShapeError: ``in`` is not a multiple of M, or ``out`` has another shape.
        DtypeError: ``w`` is not a floating-point tensor, or ``out`` has another dtype.

    Example:
        >>> soft_threshold(torch.tensor([4.0, -3.0, 1.0, 0.5]), "2:4")
        tensor([ 3., -2.,  0.,  0.])
    """
    p = as_pattern(pattern)
    return nm_soft_threshold(w, p.n, p.m, out=out)


def soft_threshold_scale(w: Tensor, pattern: PatternLike) -> Tensor:
    """S-STE's β, which makes β·S(w) the closest to w in the least-squares sense.

    ``β = ⟨w, S(w)⟩ / ‖S(w)‖²``, 0 where S(w) is zero (S-STE, Hu et al. 2024, arXiv 2409.09099); taken once per tensor and then frozen.

    Args:
        w: weights ``(..., in)``; any strides.
        pattern: ``"N:M"`` or a ``Pattern``.

    Returns:
        0-d, fp32 (fp64 for fp64 weights), on w's device; nothing is synchronised.

    Raises:
        ShapeError: ``in`` is not a multiple of M.
        DtypeError: ``w`` is not a floating-point tensor.

    Example:
        >>> soft_threshold_scale(torch.tensor([4.0, -3.0, 1.0, 0.5]), "2:4").item()  # (4·3 + 3·2) / (9 + 4)
        1.384615421295166
    """
    p = as_pattern(pattern)
    return nm_soft_threshold_scale(w, p.n, p.m)


__all__ = ["soft_threshold", "soft_threshold_scale"]
