"""Masks and pruning: mask, transposable_mask, prune, soft_threshold and its scale."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .. import reference
from ..pattern import PatternLike, ShapeError
from ..reference.common import compute_dtype
from ..shards import is_sharded
from .check import as_pattern, check_dense
from .define import Spec, define


def _like(op: str, dtype: torch.dtype | None, w: Tensor, n: int, m: int) -> tuple[Spec, ...]:
    check_dense(op, w, n, m)
    return ((w.shape, dtype or w.dtype),)


def _transposable_mask(w: Tensor, n: int, m: int) -> tuple[Spec, ...]:
    op = "nm_transposable_mask"
    if w.dim() < 2:
        raise ShapeError(f"{op}: the input has shape {tuple(w.shape)}; tiles need two dimensions. Reshape it to a matrix.")
    check_dense(op, w, n, m).check_divides(op, w.shape[-2], "the second-to-last dimension of the input")
    return ((w.shape, torch.bool),)


def _soft_threshold_scale(w: Tensor, n: int, m: int) -> tuple[Spec, ...]:
    check_dense("nm_soft_threshold_scale", w, n, m)
    return (((), compute_dtype(w.dtype)),)


_SCHEMA = "(Tensor w, int n, int m) -> Tensor"
nm_mask = define("nm_mask", _SCHEMA, partial(_like, "nm_mask", torch.bool), outs=("out",), leading=("w",), floats=False)
nm_prune = define("nm_prune", _SCHEMA, partial(_like, "nm_prune", None), outs=("out",), leading=("w",))
nm_soft_threshold = define("nm_soft_threshold", _SCHEMA, partial(_like, "nm_soft_threshold", None), outs=("out",), leading=("w",))
nm_soft_threshold_scale = define("nm_soft_threshold_scale", _SCHEMA, _soft_threshold_scale)
nm_transposable_mask = define("nm_transposable_mask", _SCHEMA, _transposable_mask, outs=("out",), leading=("w",), floats=False)


def mask(w: Tensor, pattern: PatternLike, out: Tensor | None = None) -> Tensor:
    """Mark the N largest magnitudes of every M consecutive elements of the last dimension.

    ``M_i = [ |w_i| is among the N largest of its group ]``. Ties keep the lower index, -0.0 equals 0.0, NaN ranks
    above everything; exactly N of every group are True, also in a group of zeros.

    Args:
        w: weights ``(..., in)``, usually ``(out, in)``; any strides. Use the fp32 master weight, not a rounded copy. For a DTensor the
            result is a DTensor: shards of leading dimensions stay, others are redistributed (in all ops of this file).
        out: bool tensor of w's shape to write into.

    Raises:
        ShapeError: ``in`` is not a multiple of M, or ``out`` has another shape.
        DtypeError: ``w`` is not a floating-point tensor.

    Example:
        >>> mask(torch.tensor([[3.0, -4.0, 0.5, 3.0]]), "2:4")
        tensor([[ True,  True, False, False]])
    """
    p = as_pattern(pattern)
    return nm_mask(w, p.n, p.m, out=out)


def prune(w: Tensor, pattern: PatternLike, out: Tensor | None = None) -> Tensor:
    """Set everything but the N largest magnitudes of each group to zero, in one pass.

    ``y = w ⊙ M(w)`` with M from ``mask``; kept elements keep their bits, pruned ones become +0.0 (also infinities and NaNs).
    Backward raises.

    Arguments and errors are those of ``mask``, but ``out`` has w's dtype; ``out=w`` prunes in place.

    Example:
        >>> prune(torch.tensor([3.0, -4.0, 0.5, 3.0]), "1:2")
        tensor([ 0., -4.,  0.,  3.])
    """
    p = as_pattern(pattern)
    return nm_prune(w, p.n, p.m, out=out)


def is_nm(w: Tensor, pattern: PatternLike) -> bool:
    """Whether every group of M has at most N non-zeros; -0.0 is zero, NaN is not. Synchronises the device. Errors as ``mask``.

    For a DTensor all ranks must call it, and get the same result.

    Example:
        >>> is_nm(torch.tensor([3.0, 0.0, 0.0, -4.0]), "2:4"), is_nm(torch.ones(4), "2:4")
        (True, False)
    """
    p = as_pattern(pattern)
    check_dense("is_nm", w, p.n, p.m)
    if is_sharded(w):
        from . import sharded

        return sharded.is_nm(w, p.n, p.m)
    return reference.is_nm(w, p.n, p.m)


def transposable_mask(w: Tensor, pattern: PatternLike, out: Tensor | None = None) -> Tensor:
    """The mask with the largest kept magnitude that is N:M along both dimensions of every M×M tile.

    ``max Σ_ij M_ij |w_ij|`` with N True in each row and in each column of a tile, so that W and Wᵀ are both N:M
    (Hubara et al. 2021, arXiv 2102.08124; FST, arXiv 2404.01847). 2:4 takes the best of the 90 patterns, the first in
    lexicographic order on a tie; other patterns reach the optimal total within 1e-6 relative.

    Arguments and errors are those of ``mask``, but w is ``(..., out, in)``, both multiples of M.

    Example:
        >>> transposable_mask(torch.eye(2), "1:2")
        tensor([[ True, False],
                [False,  True]])
    """
    p = as_pattern(pattern)
    return nm_transposable_mask(w, p.n, p.m, out=out)


def soft_threshold(w: Tensor, pattern: PatternLike, out: Tensor | None = None) -> Tensor:
    """S-STE's continuous projection onto N:M: shrink every magnitude of a group by the (N+1)-th largest.

    ``S(w)_i = sign(w_i) · max(|w_i| - t, 0)``, t the (N+1)-th largest magnitude of the group (0 when N = M);
    at most N per group are non-zero (S-STE, Hu et al. 2024, arXiv 2409.09099). For the scale see ``soft_threshold_scale``. Arguments and
    errors are those of ``prune``; backward raises.

    Example:
        >>> soft_threshold(torch.tensor([4.0, -3.0, 1.0, 0.5]), "2:4")
        tensor([ 3., -2.,  0.,  0.])
    """
    p = as_pattern(pattern)
    return nm_soft_threshold(w, p.n, p.m, out=out)


def soft_threshold_scale(w: Tensor, pattern: PatternLike) -> Tensor:
    """S-STE's scale β, for which β·S(w) is closest to w in the least-squares sense; arguments and errors as ``mask``.

    ``β = ⟨w, S(w)⟩ / ‖S(w)‖²``, 0 if S(w) is zero (S-STE, Hu et al. 2024, arXiv 2409.09099), for the whole tensor.
    0-d, fp32 (fp64 for fp64 weights), on w's device, without synchronisation.

    Example:
        >>> soft_threshold_scale(torch.tensor([4.0, -3.0, 1.0, 0.5]), "2:4").item()  # (4·3 + 3·2) / (9 + 4)
        1.384615421295166
    """
    p = as_pattern(pattern)
    return nm_soft_threshold_scale(w, p.n, p.m)
