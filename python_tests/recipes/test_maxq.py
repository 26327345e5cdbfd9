"""MaxQ: its mask on small numbers, and its share of dense groups. The trajectories are the roster's."""

import torch

import nmkernels as nm
from nmkernels.pattern import Pattern
from nmkernels.recipes import MaxQ
from nmkernels.recipes.contrib.maxq import PartlyDense, SoftQuery
from python_tests.for_each import for_each
from python_tests.recipes.loop import batches
from python_tests.recipes.training import F64, metrics_of, start, step

# ---- the mask


def test_query_of_the_whole_weight_counts_once_more():
    w = torch.tensor([[1.0, 2.0], [30.0, 40.0]], dtype=F64)
    got = SoftQuery(Pattern("1:2"), tau=1e-3, whole=True)(w)
    assert got.tolist() == [[0.0, 4.0], [0.0, 120.0]], "large in its row: ×2; the 2 smallest of all 4 are not large in the whole"


def test_ties_at_the_threshold():
    factor = SoftQuery(Pattern("1:2"), tau=1.0).factor(torch.tensor([[1.0, -1.0, 1.0, 0.5]]))
    assert factor.tolist() == [[1.5, 1.5, 1.5, 1.0]]
    w = torch.randn(4, 8)
    assert torch.equal(SoftQuery(Pattern("4:4"))(w), w)


def test_the_least_groups_stay_dense():
    w = torch.tensor([[1.0, 2.0, 5.0, 6.0], [-3.0, 3.0, 0.5, 0.1]], dtype=F64)
    kept = [PartlyDense(Pattern("1:2"), tau=1.0).kept(w, torch.tensor(d, dtype=F64)).int().tolist() for d in (0.0, 0.3, 0.5, 0.99, 1.0)]
    none = [[0, 1, 0, 1], [1, 0, 1, 0]]
    assert kept[0] == none
    assert kept[1] == [[0, 1, 0, 1], [1, 0, 1, 1]], "0.6 is the smallest sum"
    assert kept[2] == [[1, 1, 0, 1], [1, 0, 1, 1]]
    assert kept[3] == [[1, 1, 0, 1], [1, 1, 1, 1]] and kept[4] == [[1] * 4] * 2


def test_groups_that_tie_stay_dense_in_order():
    kept = PartlyDense(Pattern("1:2"), tau=1.0).kept(torch.ones(2, 4), torch.tensor(0.5, dtype=F64))
    assert kept.int().tolist() == [[1, 1, 1, 1], [1, 0, 1, 0]]


def test_16_bit_weights_are_ranked_and_enlarged_in_fp32():
    w = torch.randn(8, 16).bfloat16()
    got, want = SoftQuery(Pattern("2:4"))(w), SoftQuery(Pattern("2:4"))(w.float())
    assert got.dtype == torch.bfloat16 and torch.equal(got != 0, want != 0)
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=0.0)


# ---- the schedules


@for_each("levels, shares", [(None, [1, 1, 0.75, 0.5, 0.25, 0, 0, 0]), (2, [1, 1, 1, 0.5, 0.5, 0, 0, 0])])
def test_phases_and_metrics(levels, shares):
    recipe = MaxQ("2:4", 8, start=2, end=6, levels=levels)
    model, handle, optimizer = start(recipe)
    seen = []
    for batch in batches(8):
        step(model, optimizer, batch)
        got = metrics_of(handle)
        seen.append((got["phase"], got["dense_groups"], got["density"]))
    assert seen == [(int(t >= 2), d, 0.5 + d / 2) for t, d in enumerate(shares, start=1)]
    assert recipe.profile(8) == [nm.recipes.Span(2), nm.recipes.Span(4), nm.recipes.Span(2, fprop=0.5)]
