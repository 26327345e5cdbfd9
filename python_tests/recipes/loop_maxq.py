"""An independent loop for MaxQ (Xiang et al., CVPR 2024), element by element from its equations, in plain Python and torch."""

import math

import torch

from python_tests.recipes.loop import SPARSE, optimize, through


def row_query(a, k, tau):
    """Q of one list of magnitudes: σ((a − θ)/τ) for the k largest, 0 for the rest."""
    ranked = sorted(a, reverse=True)
    theta = (ranked[k - 1] + ranked[k]) / 2
    return [1 / (1 + math.exp(-(x - theta) / tau)) if x >= ranked[k - 1] else 0.0 for x in a]


def parts(w, n, m, share, tau, kernel):
    """(kept as 0 and 1, 1 + Q) of a weight."""
    rows, cols = w.shape
    a = w.abs().tolist()
    groups = [(i, j) for i in range(rows) for j in range(0, cols, m)]
    by_sum = sorted(range(len(groups)), key=lambda g: sum(a[groups[g][0]][groups[g][1] : groups[g][1] + m]))
    dense = {groups[g] for g in by_sum[: int(share * len(groups) + 1e-6)]}
    kept = torch.zeros_like(w)
    for i, j in groups:
        best = sorted(range(m), key=lambda c: -a[i][j + c])[: m if (i, j) in dense else n]
        for c in best:
            kept[i, j + c] = 1.0
    q = torch.tensor([row_query(row, cols * n // m, tau) for row in a], dtype=w.dtype)
    if kernel:
        q = q + torch.tensor(row_query([x for row in a for x in row], rows * cols * n // m, tau), dtype=w.dtype).reshape(rows, cols)
    return kept, 1 + q


def share_at(t, start, stop, schedule, levels):
    """D of step t."""
    if t >= stop:
        return 0.0
    u = max(t - start, 0) / (stop - start)
    if levels:
        u = math.floor(u * levels + 1e-9) / levels
    curve = {
        "linear": lambda: 1 - u,
        "cubic": lambda: (1 - u) ** 3,
        "cos": lambda: math.cos(math.pi * u / 2),
        "exp": lambda: 1 - (1 - math.exp(-1.5 * u)) / (1 - math.exp(-1.5)),
    }
    return curve[schedule]()


def maxq(params, data, recipe, start, stop):
    """MaxQ with D falling between the steps ``start`` and ``stop``; of ``recipe`` only plain settings are read."""
    n, m, seen = recipe.pattern.n, recipe.pattern.m, {}

    def use(k, p, t):
        share = share_at(t, start, stop, recipe.schedule, recipe.levels)
        seen[k], factor = parts(p[k].detach(), n, m, share, recipe.tau, recipe.kernel)
        used = p[k] * seen[k] * factor
        return used if recipe.gradient == "chain" else through(p[k], used)

    return optimize(params, data, use, lambda k, w, g, t: g + recipe.decay * (1 - seen[k]) * w if k in SPARSE else g)
