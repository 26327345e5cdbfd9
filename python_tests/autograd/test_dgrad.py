"""The weights of ∂L/∂x: Bi-Mask's second mask in its permuted order, SLoPe's double pruning."""

from math import comb

import pytest
import torch

import nmkernels as nm
from nmkernels.autograd import linear
from nmkernels.autograd.transforms import pruned_along_out
from nmkernels.pattern import Pattern
from nmkernels.recipes.methods.bimask import BiMasked
from nmkernels.recipes.methods.slope import DoublePruned
from python_tests import plain

PATTERNS = pytest.mark.parametrize("pattern", ["1:2", "2:4", "1:4", "2:8", "3:5", "4:4"])


def at_most(mask, n, m):
    """Whether no m consecutive rows hold more than n in any column."""
    return all(int(mask[i : i + m].sum(0).max()) <= n for i in range(0, len(mask), m))


def weight_of(pattern, rows=40, cols=80, seed=0, dtype=torch.float32):
    p = Pattern(pattern)
    w = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return p, w, nm.ops.prune(w[:, : cols // p.m * p.m], p)


@PATTERNS
def test_pruned_along_out(pattern):
    for rows in [40, 37, 1, 3]:
        p, w, _ = weight_of(pattern, rows)
        got = pruned_along_out(w, p.n, p.m)
        want = torch.cat([plain.masked(block.t().contiguous(), min(p.n, len(block)), len(block)).t() for block in w.split(p.m)])
        assert torch.equal(got, want) and at_most(got != 0, p.n, p.m), "a short last group keeps n of its rows"


# ---- Bi-Mask


@PATTERNS
def test_the_backward_mask_is_inside_the_forward_one_and_nm_in_the_permuted_order(pattern):
    for rows in [40, 37]:
        p, _, used = weight_of(pattern, rows)
        order = torch.randperm(rows)
        transposed = BiMasked(p).for_dgrad(used, order)
        same = transposed == used
        assert bool((same | (transposed == 0)).all()) and at_most(transposed[order] != 0, p.n, p.m)
        assert transposed.shape == used.shape and (p.n == p.m or int((transposed != 0).sum()) < int((used != 0).sum()))


def test_renew_takes_the_first_of_the_best_draws():
    for criterion in ["magnitude", "count"]:
        p, w, used = weight_of("2:4")
        bimask = BiMasked(p, draws=12, criterion=criterion)
        got = bimask.renew(w, [None], torch.Generator().manual_seed(3))["nm_order"]
        generator = torch.Generator().manual_seed(3)
        orders = [torch.randperm(40, generator=generator) for _ in range(12)]
        left = [bimask.for_dgrad(used, order) for order in orders]
        scores = [float(x.double().abs().sum()) if criterion == "magnitude" else int((x != 0).sum()) for x in left]
        assert torch.equal(got, orders[scores.index(max(scores))]) and len(set(scores)) > 1
        assert torch.equal(BiMasked(p, draws=0).renew(w, [None], generator)["nm_order"], torch.arange(40))


def test_more_draws_retain_more_and_the_criteria_differ():
    p, w, used = weight_of("1:4", 64, 64)
    kept = {}
    for draws in (1, 10, 100):
        for criterion in ("magnitude", "count"):
            bimask = BiMasked(p, draws=draws, criterion=criterion)
            left = bimask.for_dgrad(used, bimask.renew(w, [None], torch.Generator().manual_seed(0))["nm_order"])
            kept[draws, criterion] = float(left.abs().sum()), int((left != 0).sum())
    assert kept[1, "magnitude"][0] < kept[10, "magnitude"][0] < kept[100, "magnitude"][0]
    assert kept[100, "magnitude"][0] > kept[100, "count"][0] and kept[100, "magnitude"][1] < kept[100, "count"][1]


def test_only_the_gradient_of_x_sees_it():
    for transform in [BiMasked(Pattern("2:4")), DoublePruned(Pattern("2:4"))]:
        torch.manual_seed(0)
        w = torch.nn.Parameter(nm.ops.prune(torch.randn(12, 16, dtype=torch.float64), "2:4"))
        extras = list(transform.renew(w.detach(), [None] * len(transform.reads), torch.Generator().manual_seed(0)).values())
        x, g = torch.randn(5, 16, dtype=torch.float64, requires_grad=True), torch.randn(5, 12, dtype=torch.float64)
        used = transform(w.detach(), *extras)
        y = linear(x, w, used, transform=transform, extras=extras)
        y.backward(g)
        transposed = transform.for_dgrad(used, *extras)
        assert torch.equal(y, x @ used.t()) and not torch.equal(transposed, used)
        torch.testing.assert_close(x.grad, g @ transposed)
        full = g.t() @ x.detach()
        torch.testing.assert_close(w.grad, full if isinstance(transform, BiMasked) else full * (w != 0))


# ---- SLoPe


@PATTERNS
def test_double_pruning_is_nm_both_ways(pattern):
    for rows in [40, 37]:
        p, w, used = weight_of(pattern, rows)
        w = w[:, : used.shape[1]]
        held = DoublePruned(p).renew(w, [None, None], torch.Generator())
        twice = DoublePruned(p).for_dgrad(used, *held.values())
        assert torch.equal(held["nm_rows"], nm.ops.mask(w, p)) and torch.equal(twice, pruned_along_out(used, p.n, p.m))
        assert nm.ops.is_nm(twice, p) and at_most(twice != 0, p.n, p.m)


def test_the_row_mask_never_changes_and_the_column_mask_follows():
    p, w, _ = weight_of("2:4")
    first = DoublePruned(p).renew(w, [None, None], torch.Generator())
    later = w.flip(1) * first["nm_rows"]
    again = DoublePruned(p).renew(later, list(first.values()), torch.Generator())
    assert torch.equal(again["nm_rows"], first["nm_rows"]) and not torch.equal(again["nm_columns"], first["nm_columns"])
    assert torch.equal(DoublePruned(p).kept(w, *again.values()), first["nm_rows"])


def test_a_weight_that_is_zero_now_may_still_grow():
    held = DoublePruned(Pattern("2:4")).renew(torch.zeros(8, 8), [None, None], torch.Generator())
    assert int((held["nm_columns"] & held["nm_rows"]).sum()) == int(held["nm_columns"].sum()) > 0, "no place is lost to a pruned weight"


def test_share_of_extra_zeros():
    """Σ_{j>N} C(M,j) s^j (1−s)^{M−j} (j−N)/M of all weights, for random weights: their row masks are independent of each other."""
    for pattern, share in [("1:2", 0.125), ("2:4", 0.09375), ("2:8", 0.0584), ("1:4", None), ("3:8", None)]:
        p = Pattern(pattern)
        s = p.n / p.m
        exact = sum(comb(p.m, j) * s**j * (1 - s) ** (p.m - j) * (j - p.n) / p.m for j in range(p.n + 1, p.m + 1))
        assert share is None or abs(exact - share) < 5e-5
        second = sum(comb(p.m, j) * s**j * (1 - s) ** (p.m - j) * ((j - p.n) / p.m) ** 2 for j in range(p.n + 1, p.m + 1))
        w = torch.randn(256 * p.m, 64 * p.m, generator=torch.Generator().manual_seed(7))
        held = DoublePruned(p).renew(w, [None, None], torch.Generator())
        used = w * held["nm_rows"]
        lost = (used != 0) & ~held["nm_columns"]
        # the groups of one column are independent; columns inside a group of inputs are not, but a row keeps exactly N there: they repel
        deviation = ((second - exact**2) / (w.numel() / p.m)) ** 0.5
        assert abs(float(lost.double().mean()) - exact) < 4 * deviation
