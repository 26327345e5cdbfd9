"""The search for channel orders: against brute force where that is possible, and what it promises everywhere."""

from itertools import combinations

import pytest
import torch

import nmkernels as nm
from nmkernels.recipes import search_permutation
from nmkernels.recipes.search import permutation


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


def test_eight_columns_are_exact():
    for pattern in ["2:4", "1:4", "3:4"]:
        for seed in range(5):
            w = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            p = nm.Pattern(pattern)
            assert len(list(groupings(list(range(8)), 4))) == 35
            found = search_permutation(w, pattern)
            assert found.after == pytest.approx(best(w, p.n, 4), abs=1e-12)
            assert share(w, found.order, pattern) == pytest.approx(found.after, abs=1e-12)


@pytest.mark.slow
def test_twelve_columns_come_close():
    assert len(list(groupings(list(range(12)), 4))) == 5775
    won, possible = 0.0, 0.0
    for seed in range(3):
        w = torch.randn(16, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found, top = search_permutation(w, "2:4"), best(w, 2, 4)
        assert found.before < found.after <= top + 1e-12
        won, possible = won + found.after - found.before, possible + top - found.before
    assert won > 0.97 * possible


@pytest.mark.parametrize("pattern", ["1:2", "2:4", "1:4", "2:8", "6:8", "1:16", "4:4"])
def test_what_it_promises(pattern):
    w = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    found = search_permutation(w, pattern, escapes=5)
    assert torch.equal(found.order.sort().values, torch.arange(64)) and found.order.dtype == torch.int64
    assert found.before == pytest.approx(share(w, torch.arange(64), pattern), abs=1e-6)
    assert found.after == pytest.approx(share(w, found.order, pattern), abs=1e-6)
    assert found.before < found.after <= found.bound <= 1 or pattern == "4:4"
    assert 0 < found.efficacy <= 1


def test_columns_made_to_compete_are_parted():
    """Two groups of four that are large in the same rows: the mask loses half of them, the search nothing."""
    w = torch.zeros(8, 16)
    w[:, :4], w[:, 8:12] = 1.0, 2.0
    found = search_permutation(w, "2:4")
    assert found.before == 0.5 and found.after == 1.0


def test_nothing_to_gain_leaves_the_order():
    for w in (torch.zeros(4, 16), torch.ones(4, 16), torch.randn(4, 4), torch.zeros(0, 8)):
        found = search_permutation(w, "2:4")
        assert torch.equal(found.order, torch.arange(w.shape[1])) and found.before == found.after


@pytest.mark.slow
def test_escapes_help_and_never_hurt():
    gains = []
    for seed in range(2):
        w = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
        few, many = search_permutation(w, escapes=0), search_permutation(w, escapes=60)
        gains.append(many.after - few.after)
    assert min(gains) >= 0 and max(gains) > 0


def test_the_seed_decides():
    w = torch.randn(16, 48, generator=torch.Generator().manual_seed(0))
    state = torch.get_rng_state()
    runs = [search_permutation(w, escapes=20, seed=seed).order for seed in (0, 0, 1)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    assert torch.equal(torch.get_rng_state(), state), "torch's own generator is left alone"


def test_random_pairings_beyond_many_stripes(monkeypatch):
    w = torch.randn(16, 128, generator=torch.Generator().manual_seed(0))
    full = search_permutation(w, escapes=0)
    monkeypatch.setattr(permutation, "ALL_PAIRS", 8)
    found = search_permutation(w)
    assert found.after == pytest.approx(share(w, found.order, "2:4"), abs=1e-6)
    assert found.after - found.before > 0.8 * (full.after - full.before)


@pytest.mark.slow
def test_small_chunks_change_nothing(monkeypatch):
    w = torch.randn(16, 48, generator=torch.Generator().manual_seed(0))
    want = search_permutation(w, escapes=1)
    monkeypatch.setattr(permutation, "CHUNK", 1)
    assert torch.equal(search_permutation(w, escapes=1).order, want.order)


def test_progress_of_long_searches(monkeypatch):
    clock = iter(range(0, 10**6, 11))
    monkeypatch.setattr(permutation.time, "monotonic", lambda: next(clock))
    lines = []
    search_permutation(torch.randn(8, 32), escapes=3, progress=lines.append)
    assert any("escape 3 of 3" in line and "of the magnitude kept" in line for line in lines)


def test_errors():
    with pytest.raises(nm.RecipeError, match="escapes"):
        search_permutation(torch.randn(4, 8), escapes=-1)
    with pytest.raises(nm.RecipeError, match="infinite"):
        search_permutation(torch.full((4, 8), torch.inf))
    with pytest.raises(ValueError, match="multiple of M=4"):
        search_permutation(torch.randn(4, 6))
    with pytest.raises(ValueError, match="matrix"):
        search_permutation(torch.randn(4))
