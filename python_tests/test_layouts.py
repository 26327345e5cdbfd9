"""Layouts: the matrix of a weight is a view of it, and where it cannot be, an error."""

import pytest
import torch

import nmkernels as nm
from nmkernels.layouts import EXPERTS_T, LAYOUTS, MATRICES, REDUCED, as_matrix, as_stored, matrix_shape, ordered

STORED = {"linear": (6, 8), "embedding": (6, 8), "conv1d": (8, 6), "conv2d": (6, 8, 3, 2), "experts": (3, 6, 8), "experts_t": (3, 8, 6)}
MATRIX = {"linear": (6, 8), "embedding": (6, 8), "conv1d": (6, 8), "conv2d": (6, 48), "experts": (18, 8), "experts_t": (18, 8)}


def of_by_hand(tensor, layout):
    """The matrix, element by element."""
    rows = []
    if layout == "conv2d":
        out, cols, height, width = tensor.shape
        for o in range(out):
            rows.append([tensor[o, c, i, j] for i in range(height) for j in range(width) for c in range(cols)])
    else:
        for expert in tensor if tensor.dim() == 3 else [tensor]:
            rows += expert.t() if layout in ("conv1d", "experts_t") else expert
    return torch.stack([torch.stack(list(row)) for row in rows])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_matrix_is_a_view_with_groups_in_its_rows(layout):
    tensor = ordered(torch.randn(STORED[layout]), layout)
    matrix = as_matrix(tensor, layout)
    assert matrix.shape == MATRIX[layout] == matrix_shape(tensor.shape, layout)
    assert torch.equal(matrix, of_by_hand(tensor, layout))
    assert torch.equal(as_stored(matrix, layout, tensor.shape), tensor)
    assert as_stored(matrix.contiguous(), layout, tensor.shape).stride() == tensor.stride() or layout in MATRICES
    matrix.zero_()
    assert not tensor.any()
    # what is next to each other in a row is next to each other along the dimension that is summed over
    tensor.select(REDUCED[layout], 1).fill_(1.0)
    assert matrix[0, :2].tolist() == [0.0, 1.0]
    assert ordered(tensor, layout) is tensor


@pytest.mark.parametrize("layout", ["conv2d", EXPERTS_T])
def test_a_lost_order_is_an_error_and_never_a_copy(layout):
    tensor = torch.randn(STORED[layout])
    with pytest.raises(nm.ShapeError, match=r"another order in memory.*handle\.refresh\(\)"):
        as_matrix(tensor, layout)
    right = ordered(tensor, layout)
    assert torch.equal(right, tensor) and right.stride() != tensor.stride()
    # the order survives what torch does with a Parameter
    for kept in (right.clone(), torch.zeros_like(right), right.double(), right.detach(), torch.empty_like(right, dtype=torch.uint8)):
        as_matrix(kept, layout)


def test_a_kernel_of_one_element_is_in_order_as_it_is():
    tensor = torch.randn(6, 8, 1, 1)
    assert ordered(tensor, "conv2d") is tensor and as_matrix(tensor, "conv2d").data_ptr() == tensor.data_ptr()
