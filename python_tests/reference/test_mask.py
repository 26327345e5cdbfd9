"""mask, prune and is_nm against a sort in plain Python."""

import math

import torch

from nmkernels.reference import is_nm, mask, prune
from nmkernels.testing import equal_bits
from python_tests.for_each import for_each
from python_tests.reference.conftest import DTYPES, edge

PATTERNS = [(1, 1), (1, 2), (2, 2), (2, 3), (1, 4), (2, 4), (3, 4), (4, 4), (2, 8), (3, 16), (5, 32), (128, 256), (1, 256)]


def sorted_mask(row, n, m):
    """The definition, one group at a time: NaN first, then magnitude, then the lower index."""
    out = []
    for start in range(0, len(row), m):
        group = row[start : start + m]
        order = sorted(range(m), key=lambda i: (not math.isnan(group[i]), 0.0 if math.isnan(group[i]) else -abs(group[i]), i))
        kept = set(order[:n])
        out += [i in kept for i in range(m)]
    return out


@for_each("n, m", PATTERNS)
@for_each("dtype", DTYPES)
def test_equals_a_sort_of_each_group(n, m, dtype):
    w = edge(8, 3 * m, dtype, seed=n + m)
    assert mask(w, n, m).tolist() == [sorted_mask(row, n, m) for row in w.tolist()]


def test_nans_of_any_payload_tie_and_rank_above_infinity():
    bits = torch.tensor([0x7F800000, 0x7FC00001, 0x7F800001, -1], dtype=torch.int32)  # inf and three NaNs, one negative
    assert mask(bits.view(torch.float32), 2, 4).tolist() == [False, True, True, False]


def test_a_lazily_negated_tensor_has_the_same_mask():
    w = torch.randn(4, 8)
    assert torch.equal(mask(torch._neg_view(w), 2, 4), mask(w, 2, 4))


@for_each("dtype", DTYPES)
def test_prune_keeps_bits_and_never_multiplies(dtype):
    w = edge(64, 32, dtype)
    assert equal_bits(prune(w, 2, 4), torch.where(mask(w, 2, 4), w, torch.zeros_like(w)))
    assert torch.equal(w.view(torch.uint8), edge(64, 32, dtype).view(torch.uint8)), "the input was changed"
    pruned = prune(torch.tensor([math.nan, math.nan, math.nan, -math.inf]), 2, 4)
    assert pruned[2:].view(torch.int32).tolist() == [0, 0]
    assert math.copysign(1, prune(torch.tensor([-0.0, 0.0, -0.0, -0.0]), 1, 4)[0]) == -1


def test_is_nm_counts_nan_but_not_negative_zero():
    assert is_nm(torch.tensor([1.0, -0.0, 0.0, 2.0]), 2, 4)
    assert not is_nm(torch.tensor([1.0, math.nan, 0.0, 2.0]), 2, 4)
    assert not is_nm(torch.tensor([0.0] * 4 + [1.0, 1.0, 1.0, 0.0]), 2, 4), "only the last group is too full"
