"""Sharing a budget out: which of several choices each item takes, so that the costs stay within it and the losses are least."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..pattern import RecipeError

SUMS = 1 << 14
"""So many sums of costs are told apart."""

Table = Sequence[Sequence[int]]


def allocate(costs: Table, losses: Sequence[Sequence[float]], budget: int, fill: bool = False) -> list[int]:
    """The choice of each item: Σ loss is least where Σ cost ≤ budget (the multiple-choice knapsack problem).

    Dynamic programming over the sums of costs, in units of their greatest common divisor: exact where the budget is at most ``SUMS``
    units. Where it is more, costs are rounded to budget / ``SUMS``, and if the choices then exceed the budget, those with the least
    rise of the loss per cost saved become cheaper until they do not.

    Args:
        costs, losses: of each choice of each item, by rising cost.
        budget: the largest sum of costs.
        fill: take the largest possible sum of costs first, and the least loss among the choices that reach it.

    Raises:
        RecipeError: even the cheapest choices cost more.

    Example:
        >>> allocate([[1, 2, 4], [2, 4, 8]], [[9, 3, 0], [9, 5, 0]], 8)
        [2, 1]
    """
    least = sum(item[0] for item in costs)
    if least > budget:
        raise RecipeError(f"even the cheapest choices cost {least}, more than the budget of {budget}.")
    unit = math.gcd(*(cost for item in costs for cost in item)) or 1
    unit *= -(-(budget // unit + 1) // SUMS)
    whole = [[round(cost / unit) for cost in item] for item in costs]
    limit = max(budget // unit, sum(item[0] for item in whole))
    best = torch.full((limit + 1,), torch.inf, dtype=torch.float64)
    best[0] = 0.0
    trail = []
    for item, values in zip(whole, losses, strict=True):
        best, taken = _with(item, values, best)
        trail.append(taken)
    at = int(best.isfinite().nonzero().max()) if fill else int(best.argmin())
    choices = []
    for taken, item in zip(reversed(trail), reversed(whole), strict=True):
        choices.append(int(taken[at]))
        at -= item[choices[-1]]
    return _within(choices[::-1], costs, losses, budget)


def _with(costs: Sequence[int], losses: Sequence[float], best: Tensor) -> tuple[Tensor, Tensor]:
    """The least loss at each sum with one item more, and the choice of that item; the first of equal ones."""
    new, taken = torch.full_like(best, torch.inf), torch.zeros(len(best), dtype=torch.int16)
    for choice, (cost, loss) in enumerate(zip(costs, losses, strict=True)):
        if cost >= len(best):
            break
        sums, here, which = best[: len(best) - cost] + loss, new[cost:], taken[cost:]
        less = sums < here
        torch.where(less, sums, here, out=here)
        which.masked_fill_(less, choice)
    return new, taken


def _within(choices: list[int], costs: Table, losses: Sequence[Sequence[float]], budget: int) -> list[int]:
    over = sum(item[choice] for item, choice in zip(costs, choices, strict=True)) - budget
    while over > 0:

        def rise(i: int) -> float:
            c = choices[i]
            return (losses[i][c - 1] - losses[i][c]) / (costs[i][c] - costs[i][c - 1]) if c else math.inf

        i = min(range(len(choices)), key=rise)
        over -= costs[i][choices[i]] - costs[i][choices[i] - 1]
        choices[i] -= 1
    return choices
