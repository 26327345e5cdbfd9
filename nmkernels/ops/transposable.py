"""transposable_mask: N:M along rows and along columns at once."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pattern import PatternLike, ShapeError
from .check import as_pattern, check_dense
from .define import Spec, define


def _transposable_mask(w: Tensor, n: int, m: int) -> tuple[Spec, ...]:
    op = "nm_transposable_mask"
    if w.dim() < 2:
        raise ShapeError(f"{op}: the input has shape {tuple(w.shape)}; tiles need two dimensions. Reshape it to a matrix.")
    p = check_dense(op, w, n, m)
    if w.shape[-2] % m:
        p.check_divides(op, int(w.shape[-2]), "the second-to-last dimension of the input")
    return ((w.shape, torch.bool),)


_SCHEMA = "(Tensor w, int n, int m)"
nm_transposable_mask = define(
    "nm_transposable_mask", _SCHEMA + " -> Tensor", _transposable_mask, outs=("out",), leading=("w",), floats=False
)


def transposable_mask(w: Tensor, pattern: PatternLike, out: Tensor | None = None) -> Tensor:
    """The mask of largest kept magnitude that is N:M along both dimensions of every M×M tile.

    ``max Σ_ij M_ij |w_ij|`` with N True in each row and in each column of a tile, so that W and Wᵀ are both N:M
    (Hubara et al. 2021, arXiv 2102.08124; FST, arXiv 2404.01847). 2:4 takes the best of the 90 patterns, the first in
    lexicographic order on a tie; other patterns reach the optimal total within 1e-6 relative.

    Args:
        w: weights ``(..., out, in)``, both multiples of M.
        pattern: ``"N:M"`` or a ``Pattern``.
        out: bool tensor of w's shape to write into.

    Returns:
        bool, the shape of ``w``, contiguous.

    Raises:
        ShapeError: one of the last two dimensions is missing or not a multiple of M, or ``out`` has another shape.
        DtypeError: ``w`` is not a floating-point tensor.

    Example:
        >>> transposable_mask(torch.eye(2), "1:2")
        tensor([[ True, False],
                [False,  True]])
    """
    p = as_pattern(pattern)
    return nm_transposable_mask(w, p.n, p.m, out=out)


__all__ = ["transposable_mask"]
