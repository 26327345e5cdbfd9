"""The search for channel orders: against brute force where that is possible, and what it promises everywhere."""

from itertools import combinations

import pytest
import torch

import nmkernels as nm
from nmkernels.recipes import search_permutation
from nmkernels.recipes.methods import permutation
from python_tests.for_each import for_each


def share(w, order, pattern):
    """The share of Σ|W| that the package's own mask keeps in this order."""
    w = w[:, order].double()
    return float((w * nm.ops.mask(w, pattern)).abs().sum() / w.abs().sum())


def groupings(columns, m):
    """Every way to split ``columns`` into groups of m."""
    if not columns:
        yield []
        return
    first, *rest = columns
    for others in combinations(rest, m - 1):
        left = [c for c in rest if c not in others]
        yield from ([[first, *others], *more] for more in groupings(left, m))


def best(w, n, m):
    """The best share over all groupings, by brute force."""
    mags = w.abs()
    value = {g: mags[:, list(g)].topk(n, 1).values.sum().item() for g in combinations(range(w.shape[1]), m)}
    return max(sum(value[tuple(g)] for g in grouping) for grouping in groupings(list(range(w.shape[1])), m)) / mags.sum().item()


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "3:4"])
def test_eight_columns_are_exact(pattern):
    for seed in range(4):
        w = randn(16, 8, seed=seed).double()
        found = search_permutation(w, pattern)
        assert found.after == pytest.approx(best(w, nm.Pattern(pattern).n, 4), abs=1e-12)


@pytest.mark.slow
def test_twelve_columns_come_close_and_escapes_never_hurt():
    won = possible = 0.0
    for seed in range(2):
        w = randn(16, 12, seed=seed).double()
        few, found, top = search_permutation(w, escapes=0), search_permutation(w, escapes=20), best(w, 2, 4)
        assert found.before < few.after <= found.after <= top + 1e-12
        won, possible = won + found.after - found.before, possible + top - found.before
    assert won > 0.97 * possible


@pytest.mark.parametrize("pattern", ["1:2", "2:4", "1:4", "2:8", "6:8", "1:16", "4:4"])
def test_what_it_promises(pattern):
    w = randn(16, 32)
    found = search_permutation(w, pattern, escapes=5)
    assert torch.equal(found.order.sort().values, torch.arange(32)) and found.order.dtype == torch.int64
    assert found.before == pytest.approx(share(w, torch.arange(32), pattern), abs=1e-6)
    assert found.after == pytest.approx(share(w, found.order, pattern), abs=1e-6)
    assert found.before < found.after <= found.bound <= 1 or pattern == "4:4"
    assert 0 < found.efficacy <= 1


def test_nothing_to_gain_leaves_the_order():
    for w in (torch.zeros(4, 16), torch.ones(4, 16), torch.randn(4, 4), torch.zeros(0, 8)):
        found = search_permutation(w, "2:4")
        assert torch.equal(found.order, torch.arange(w.shape[1])) and found.before == found.after


def test_the_seed_decides_and_chunks_change_nothing(monkeypatch):
    w, state = randn(16, 48), torch.get_rng_state()
    runs = [search_permutation(w, escapes=6, seed=seed).order for seed in (0, 1)]
    monkeypatch.setattr(permutation, "CHUNK", 256)
    again = search_permutation(w, escapes=6, seed=0).order
    assert torch.equal(runs[0], again) and not torch.equal(*runs)
    assert torch.equal(torch.get_rng_state(), state), "torch's own generator is left alone"


def test_random_pairings_beyond_many_stripes(monkeypatch):
    w = randn(8, 64)
    full = search_permutation(w, escapes=0)
    monkeypatch.setattr(permutation, "ALL_PAIRS", 8)
    found = search_permutation(w)
    assert found.after == pytest.approx(share(w, found.order, "2:4"), abs=1e-6)
    assert found.after - found.before > 0.8 * (full.after - full.before)


@for_each(
    "w, options, error, match",
    [
        (torch.randn(4, 8), {"escapes": -1}, nm.RecipeError, "escapes"),
        (torch.full((4, 8), torch.inf), {}, nm.RecipeError, "infinite"),
        (torch.randn(4, 6), {}, ValueError, "multiple of M=4"),
        (torch.randn(4), {}, ValueError, "matrix"),
    ],
)
def test_errors(w, options, error, match):
    with pytest.raises(error, match=match):
        search_permutation(w, **options)
