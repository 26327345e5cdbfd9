"""How a Parameter stores a weight, and the matrix ``(rows, in)`` that masks, updates and files use.

Groups run along the last dimension of the matrix, the one that the layer sums over. The matrix is a view of the stored tensor, never a
copy: writing to it writes to the Parameter. So the memory of a weight with more than two dimensions must be in the order of its matrix;
``ordered`` ensures that.

=============  =========================  =====================================================
layout         stored                     matrix
=============  =========================  =====================================================
``linear``     ``(out, in)``              itself
``conv1d``     ``(in, out)``              its transpose (Hugging Face's Conv1D)
``embedding``  ``(ids, features)``        itself
``conv2d``     ``(out, in, kh, kw)``      ``(out, kh · kw · in)``; the memory is channels-last
``experts``    ``(E, rows, in)``          ``(E · rows, in)``
``experts_t``  ``(E, in, rows)``          ``(E · rows, in)``; the memory is that of ``(E, rows, in)``
=============  =========================  =====================================================
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .pattern import ShapeError

LAYOUTS = LINEAR, CONV1D, EMBEDDING, CONV2D, EXPERTS, EXPERTS_T = "linear", "conv1d", "embedding", "conv2d", "experts", "experts_t"
MATRICES = frozenset({LINEAR, CONV1D, EMBEDDING})
"""The layouts whose stored tensor is a matrix, with any strides."""
REDUCED = {LINEAR: 1, CONV1D: 0, EMBEDDING: 1, CONV2D: 1, EXPERTS: 2, EXPERTS_T: 1}
"""The dimension of the stored tensor along which groups run."""
ORDERS = {LINEAR: (0, 1), CONV1D: (1, 0), EMBEDDING: (0, 1), CONV2D: (0, 2, 3, 1), EXPERTS: (0, 1, 2), EXPERTS_T: (0, 2, 1)}
"""The dimensions of the stored tensor in the order of the matrix; in memory, ``MATRICES`` may have another order."""
ROWS = {LINEAR: 1, CONV1D: 1, EMBEDDING: 1, CONV2D: 1, EXPERTS: 2, EXPERTS_T: 2}
"""How many of the leading ones are rows."""


def matrix_shape(shape: Sequence[int], layout: str) -> tuple[int, int]:
    """``(rows, in)`` of a tensor stored with ``shape``."""
    sizes, rows, cols = [int(shape[dim]) for dim in ORDERS[layout]], 1, 1
    for size in sizes[: ROWS[layout]]:
        rows *= size
    for size in sizes[ROWS[layout] :]:
        cols *= size
    return rows, cols


def as_matrix(tensor: Tensor, layout: str) -> Tensor:
    """The matrix ``(rows, in)`` of a stored ``tensor``, sharing its memory.

    Raises:
        ShapeError: the memory is not in the order of ``layout``, so that the matrix would be a copy.
    """
    if layout in (LINEAR, EMBEDDING):
        return tensor
    if layout == CONV1D:
        return tensor.t()
    sorted_ = tensor.permute(ORDERS[layout])
    if not sorted_.is_contiguous():
        raise ShapeError(
            f"a weight {tuple(tensor.shape)} of layout {layout!r} has another order in memory (strides {tensor.stride()}), so an "
            "update of its masked matrix would go to a copy. Its data was replaced, as vector_to_parameters or "
            "weight.data = ... do. handle.refresh() restores the order."
        )
    return sorted_.view(matrix_shape(tensor.shape, layout))


def as_stored(matrix: Tensor, layout: str, shape: Sequence[int]) -> Tensor:
    """The inverse of ``as_matrix``: ``matrix`` ``(rows, in)`` as a tensor of the stored ``shape``, sharing memory if it is contiguous."""
    if layout in (LINEAR, EMBEDDING):
        return matrix
    if layout == CONV1D:
        return matrix.t()
    order = ORDERS[layout]
    return matrix.reshape([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(order))])


def ordered(tensor: Tensor, layout: str) -> Tensor:
    """``tensor`` with its memory in the order of ``layout``: itself if it already is, else a copy."""
    if layout in MATRICES:
        return tensor
    sorted_ = tensor.permute(ORDERS[layout])
    return tensor if sorted_.is_contiguous() else as_stored(sorted_.contiguous(), layout, tensor.shape)


def transposed(x: Tensor) -> bool:
    """Whether a matrix is stored transposed."""
    return x.dim() == 2 and not x.is_contiguous() and x.t().is_contiguous()
