"""The compressed form against a loop over groups in plain Python."""

import pytest
import torch

from nmkernels.pattern import Pattern, ShapeError
from nmkernels.reference import compress, decompress, mask
from nmkernels.testing import equal_bits
from python_tests.for_each import for_each
from python_tests.reference.conftest import DTYPES, edge

PATTERNS = [(1, 1), (1, 2), (2, 2), (2, 3), (1, 4), (2, 4), (4, 4), (2, 8), (5, 12), (3, 16), (3, 17), (5, 32), (1, 256)]


def looped(w, n, m, keep):
    """Values and index bytes of one row, by the words of the format."""
    bits = 2 if m <= 4 else 4 if m <= 16 else 8
    values, code, count = [], 0, 0
    for start in range(0, len(w), m):
        kept = [i for i in range(m) if keep[start + i]]
        spare = [i for i in range(m) if i not in kept][: n - len(kept)]
        for i in sorted(kept + spare):
            values.append(w[start + i] if i in kept else 0.0)
            code, count = code | i << (count * bits), count + 1
    return values, list(code.to_bytes((count * bits + 7) // 8, "little"))


@for_each("n, m", PATTERNS)
@for_each("given", ["none", "full", "short", "empty"])
@for_each("dtype", DTYPES)
def test_equals_a_loop(n, m, given, dtype):
    w = edge(5, 3 * m, dtype, seed=m)
    keep = mask(w, n, m)
    if given == "short":
        keep &= torch.rand(w.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    elif given == "empty":
        keep[:] = False
    values, indices = compress(w, n, m, None if given == "none" else keep)
    rows = [looped(row, n, m, k) for row, k in zip(w.tolist(), keep.tolist(), strict=True)]
    assert equal_bits(values, torch.tensor([r[0] for r in rows], dtype=torch.float64).to(dtype))
    assert indices.dtype == torch.uint8 and indices.tolist() == [r[1] for r in rows]
    assert indices.shape[-1] == Pattern(n, m).index_bytes(3 * m)
    assert equal_bits(decompress(values, indices, n, m, 3 * m), torch.where(keep, w, torch.zeros_like(w)))


def test_damaged_indices_and_masks_that_are_too_full():
    with pytest.raises(ShapeError, match=r"compress: the mask keeps 4.*2:4 stores 2"):
        compress(torch.ones(2, 8), 2, 4, torch.ones(2, 8, dtype=torch.bool))
    with pytest.raises(ShapeError, match="index 3 does not exist in a group of 3"):
        decompress(torch.ones(1), torch.tensor([3], dtype=torch.uint8), 1, 3, 3)
