"""mask, prune and is_nm against brute force over subsets and a sort in plain Python."""

import itertools
import math

import torch

from nmkernels.reference import is_nm, mask, prune
from nmkernels.testing import equal_bits
from python_tests.each import each
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


@each("n, m", PATTERNS)
@each("dtype", DTYPES)
def test_equals_a_sort_of_each_group(n, m, dtype):
    w = edge(8, 3 * m, dtype, seed=n + m)
    assert mask(w, n, m).tolist() == [sorted_mask(row, n, m) for row in w.tolist()]


@each("n", [1, 2, 3])
def test_every_group_of_four_from_seven_values_keeps_the_best_subset(n):
    values = [0.0, -0.0, 1.0, -1.0, 2.0, -math.inf, 1e-45]
    groups = torch.tensor(list(itertools.product(values, repeat=4)))
    for group, got in zip(groups.abs().tolist(), mask(groups, n, 4).tolist(), strict=True):
        # itertools gives subsets in order of index, and max keeps the first, so ties keep the lower index.
        best = max(itertools.combinations(range(4), n), key=lambda s: sorted((group[i] for i in s), reverse=True))
        assert [i for i in range(4) if got[i]] == list(best)


def test_nans_of_any_payload_tie_and_rank_above_infinity():
    bits = torch.tensor([0x7F800000, 0x7FC00001, 0x7F800001, -1], dtype=torch.int32)  # inf and three NaNs, one negative
    assert mask(bits.view(torch.float32), 2, 4).tolist() == [False, True, True, False]


def test_a_lazily_negated_tensor_has_the_same_mask():
    w = torch.randn(4, 8)
    assert torch.equal(mask(torch._neg_view(w), 2, 4), mask(w, 2, 4))


@each("view", ["transposed", "strided", "expanded", "sliced"])
@each("dtype", DTYPES)
def test_strides_do_not_matter(view, dtype):
    base = edge(16, 16, dtype)
    w = {"transposed": base.T, "strided": base[:, ::2], "expanded": base[:1].expand(5, 16), "sliced": base[3:, 4:12]}[view]
    copy = w.clone(memory_format=torch.contiguous_format)
    assert torch.equal(mask(w, 2, 4), mask(copy, 2, 4)) and mask(w, 2, 4).is_contiguous()
    assert equal_bits(prune(w, 2, 4), prune(copy, 2, 4)) and prune(w, 2, 4).is_contiguous()
    assert is_nm(w, 2, 4) == is_nm(copy, 2, 4)


@each("shape", [(0, 8), (3, 0), (0,), (2, 0, 4), (2, 3, 8), (8,)])
def test_any_leading_dimensions_and_empty_tensors(shape):
    w = torch.randn(shape)
    assert mask(w, 2, 4).shape == shape and prune(w, 2, 4).shape == shape
    assert torch.equal(mask(w, 2, 4).flatten(), mask(w.flatten(), 2, 4))
    assert is_nm(prune(w, 2, 4), 2, 4)


@each("dtype", DTYPES)
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
