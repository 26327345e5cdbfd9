"""mask and prune: the N largest magnitudes of every M consecutive elements."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..pattern import PatternLike
from .check import as_pattern, check_dense
from .define import Spec, define


def _mask(w: Tensor, n: int, m: int) -> tuple[Spec, ...]:
    check_dense("nm_mask", w, n, m)
    return ((w.shape, torch.bool),)


def _prune(w: Tensor, n: int, m: int) -> tuple[Spec, ...]:
    check_dense("nm_prune", w, n, m)
    return ((w.shape, w.dtype),)


_SCHEMA = "(Tensor w, int n, int m)"
nm_mask = define("nm_mask", _SCHEMA + " -> Tensor", _mask, outs=("out",), leading=("w",), floats=False)
nm_prune = define("nm_prune", _SCHEMA + " -> Tensor", _prune, outs=("out",), leading=("w",))


def mask(w: Tensor, pattern: PatternLike, out: Tensor | None = None) -> Tensor:
    """True at the N largest magnitudes of every M consecutive elements of the last dimension.

    ``M_i = [ |w_i| is among the N largest of its group ]``. Ties keep the lower index, -0.0 equals 0.0, NaN ranks
    above everything; exactly N of every group are True, also in a group of zeros.

    Args:
        w: weights ``(..., in)``, usually ``(out, in)``; any strides. Take the fp32 master weight, not a rounded copy.
        pattern: ``"N:M"`` or a ``Pattern``.
        out: bool tensor of w's shape to write into.

    Returns:
        bool, the shape of ``w``, contiguous.

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
    """``w`` with everything but the N largest magnitudes of each group set to zero, in one pass.

    ``y = w ⊙ M(w)`` with M of ``mask``; kept elements keep their bits, the others become +0.0 (an infinite or
    NaN element that is pruned too).

    Args:
        w: weights ``(..., in)``; any strides.
        pattern: ``"N:M"`` or a ``Pattern``.
        out: tensor of w's shape and dtype to write into; ``out=w`` prunes in place.

    Returns:
        the shape and dtype of ``w``, contiguous. It has no gradient: backward through it raises.

    Raises:
        ShapeError: ``in`` is not a multiple of M, or ``out`` has another shape.
        DtypeError: ``w`` is not a floating-point tensor, or ``out`` has another dtype.

    Example:
        >>> prune(torch.tensor([3.0, -4.0, 0.5, 3.0]), "1:2")
        tensor([ 0., -4.,  0.,  3.])
    """
    p = as_pattern(pattern)
    return nm_prune(w, p.n, p.m, out=out)


def is_nm(w: Tensor, pattern: PatternLike) -> bool:
    """Whether every group of M has at most N non-zeros; -0.0 is zero, NaN is not. Waits for the device.

    Raises:
        ShapeError, DtypeError: as ``mask``.

    Example:
        >>> is_nm(torch.tensor([3.0, 0.0, 0.0, -4.0]), "2:4"), is_nm(torch.ones(4), "2:4")
        (True, False)
    """
    p = as_pattern(pattern)
    return reference.is_nm(w, p.n, p.m)


__all__ = ["is_nm", "mask", "prune"]
