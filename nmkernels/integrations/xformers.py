"""xFormers' ``sparsify24`` by its names: 2:4 along rows and columns, differentiable, on every device.

The results are ordinary dense tensors with zeros, so every operation accepts them and none gets faster; for faster GEMMs use layers
(``nm.sparsify_(model, "fst:2:4")`` also has one mask for x Wᵀ and g W). ``algo`` and ``gradient`` have their meanings in xFormers, which
chooses the zeros of a 4×4 tile greedily where this package finds the optimum. ``backend`` is ignored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..arguments import finite_number
from ..pattern import NMError, OptionError, ShapeError

GRADIENTS = "24sparse", "24dense", "ste"
ALGORITHMS = "", "largest_values_greedy", "largest_abs_values_greedy"
MASK = "_nm_mask24"


def sparsify24(x: Tensor, algo: str = "", gradient: str = "24sparse", backend: str = "cutlass") -> Tensor:
    """``x`` ``(rows, cols)`` with at most two non-zeros in each row and column of every 4×4 tile.

    Args:
        algo: which are kept: the largest magnitudes (``"largest_abs_values_greedy"``) or values (``""``, ``"largest_values_greedy"``).
        gradient: ∂L/∂x where x is kept and 0 elsewhere (``"24sparse"``, ``"24dense"``), or ∂L/∂x everywhere (``"ste"``).

    Raises:
        OptionError: another algorithm or gradient.
        ShapeError: x is not a matrix, or its sizes are not multiples of 4.

    Example:
        >>> x = torch.tensor([[4.0, 3, 2, 1], [3, 4, 1, 2], [1, 2, 4, 3], [2, 1, 3, 4]])
        >>> sparsify24(x)
        tensor([[4., 3., 0., 0.],
                [3., 4., 0., 0.],
                [0., 0., 4., 3.],
                [0., 0., 3., 4.]])
    """
    return _with_mask(_masked(x, _mask(x, algo), gradient))


def sparsify24_ste(x: Tensor, algo: str = "", backend: str = "cutlass", bw_mul0: float = 1.0, bw_mul1: float = 1.0) -> Tensor:
    """``sparsify24`` with a gradient for every element, times ``bw_mul0`` where x is pruned and ``bw_mul1`` where it is kept."""
    outside = finite_number(OptionError, "sparsify24_ste: bw_mul0", bw_mul0, least=None)
    inside = finite_number(OptionError, "sparsify24_ste: bw_mul1", bw_mul1, least=None)
    mask = _mask(x, algo)
    return _with_mask((_Masked.apply(x, mask, outside, inside), mask))


def sparsify24_like(x: Tensor, pattern: Tensor, gradient: str = "24sparse", backend: str = "", out_dense: bool | None = None) -> Tensor:
    """``x`` with the zeros of ``pattern``, a result of these functions or any tensor of x's shape with 2:4 zeros.

    Raises:
        OptionError: another gradient.
        ShapeError: ``pattern`` has another shape, or is not 2:4.
    """
    mask: Tensor | None = getattr(pattern, MASK, None)
    if mask is None:
        mask = pattern.detach() != 0
        if pattern.shape == x.shape and not (ops.is_nm(mask.float(), "2:4") or ops.is_nm(mask.float().t(), "2:4")):
            raise ShapeError("sparsify24_like: the zeros of pattern are 2:4 along neither rows nor columns; pass a result of sparsify24.")
    if mask.shape != x.shape:
        raise ShapeError(f"sparsify24_like: x has shape {tuple(x.shape)} and pattern {tuple(mask.shape)}; they must be equal.")
    return _with_mask(_masked(x, mask, gradient))


class _Masked(torch.autograd.Function):
    """x where the mask is True, else +0; the gradient is scaled by one number inside the mask and another outside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, outside: float, inside: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scales = outside, inside
        return torch.where(mask, x, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (mask,), (outside, inside) = grads, ctx.saved_tensors, ctx.scales
        if outside != 1.0 or inside != 1.0:
            g = torch.where(mask, g * inside, g * outside if outside else torch.zeros_like(g))
        return g, None, None, None


def _masked(x: Tensor, mask: Tensor, gradient: str) -> tuple[Tensor, Tensor]:
    if gradient not in GRADIENTS:
        raise OptionError(f"sparsify24: gradient={gradient!r} is unknown; choose one of {', '.join(GRADIENTS)}.")
    return _Masked.apply(x, mask, 1.0 if gradient == "ste" else 0.0, 1.0), mask


def _mask(x: Tensor, algo: str) -> Tensor:
    if algo not in ALGORITHMS:
        known = ", ".join(map(repr, ALGORITHMS))
        raise OptionError(f"sparsify24: algo={algo!r} is not supported; choose one of {known}.")
    if x.dim() != 2:
        raise ShapeError(f"sparsify24: x must be a matrix, got shape {tuple(x.shape)}; flatten the leading dimensions.")
    x = x.detach()
    try:
        # by value: after subtracting the minimum, magnitudes have the order of the values
        return ops.transposable_mask(x if algo == "largest_abs_values_greedy" else x.float() - x.min().float(), "2:4")
    except NMError as error:
        raise type(error)(f"sparsify24: {error}") from error


def _with_mask(pair: tuple[Tensor, Tensor]) -> Tensor:
    """The tensor, with its mask as an attribute: kept elements may be zero."""
    out, mask = pair
    if not torch.compiler.is_compiling():
        setattr(out, MASK, mask)
    return out
