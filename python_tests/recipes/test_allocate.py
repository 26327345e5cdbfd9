"""Sharing a budget out equals trying everything; and stays within the budget where it cannot."""

import itertools
import random

import pytest

import nmkernels as nm
from nmkernels.recipes.methods import layerwise as module
from nmkernels.recipes.methods.layerwise import allocate


def problem(seed, items=5):
    r = random.Random(seed)
    costs = [sorted(r.sample(range(1, 60), r.randint(1, 5))) for _ in range(items)]
    losses = [[r.random() * 10 for _ in item] for item in costs]
    least, most = sum(c[0] for c in costs), sum(c[-1] for c in costs)
    return costs, losses, r.randint(least, most)


def totals(costs, losses, choices):
    return sum(c[i] for c, i in zip(costs, choices, strict=True)), sum(v[i] for v, i in zip(losses, choices, strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_equals_trying_everything(seed):
    costs, losses, budget = problem(seed)
    every = [totals(costs, losses, c) for c in itertools.product(*(range(len(item)) for item in costs))]
    cost, loss = totals(costs, losses, allocate(costs, losses, budget))
    assert cost <= budget and loss == pytest.approx(min(v for c, v in every if c <= budget))
    cost, loss = totals(costs, losses, allocate(costs, losses, budget, fill=True))
    most = max(c for c, _ in every if c <= budget)
    assert cost == most and loss == pytest.approx(min(v for c, v in every if c == most))


def test_the_unit_is_the_common_divisor(monkeypatch):
    """Seven units of a million are seven sums, not seven million."""
    monkeypatch.setattr(module, "SUMS", 8)
    assert allocate([[10**6, 2 * 10**6, 4 * 10**6]] * 2, [[9, 3, 0], [9, 5, 0]], 7 * 10**6) == [1, 2]
    assert allocate([[10**6, 2 * 10**6, 4 * 10**6]] * 2, [[9, 3, 0], [9, 5, 0]], 6 * 10**6 - 1) == [1, 1]


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_with_fewer_sums_it_is_near(monkeypatch, seed, fill):
    r = random.Random(seed)
    sizes = [r.randint(900, 1100) for _ in range(30)]
    costs = [[s, 2 * s, 4 * s, 8 * s] for s in sizes]
    losses = [[s / n for n in (1, 2, 4, 8)] for s in sizes]
    budget = 3 * sum(sizes)
    _, best = totals(costs, losses, allocate(costs, losses, budget, fill))
    monkeypatch.setattr(module, "SUMS", 256)
    cost, loss = totals(costs, losses, allocate(costs, losses, budget, fill))
    assert cost <= budget and cost > 0.97 * budget and loss < 1.02 * best


def test_too_small_a_budget():
    with pytest.raises(nm.RecipeError, match="cheapest choices cost 3, more than the budget of 2"):
        allocate([[1, 2], [2, 4]], [[1, 0], [1, 0]], 2)
