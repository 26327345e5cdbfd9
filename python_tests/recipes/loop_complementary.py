"""Complementary sparsity by an independent loop, written from its definition in plain torch."""

import torch

from python_tests.recipes.loop import SPARSE, optimize, through


def spaced(w, n, m, spacing=None):
    """1 at the n largest magnitudes of every m weights of a row that lie ``spacing`` apart; ties keep the first."""
    s = spacing or w.shape[1] // m
    mask = torch.zeros_like(w)
    for block in range(0, w.shape[1], s * m):
        for j in range(block, block + s):
            group = list(range(j, j + s * m, s))
            for i, row in enumerate(w.abs()):
                best = sorted(group, key=lambda k: (-float(row[k]), k))[:n]
                mask[i, best] = 1.0
    return mask


def complementary(params, data, n, m, spacing=None, decay=0.0, chain=False):
    """Adam on g + λ (1 − M) ⊙ W, or M ⊙ g + λ (1 − M) ⊙ W, at W̃ = M ⊙ W."""

    def use(k, p, t):
        used = p[k] * spaced(p[k].detach(), n, m, spacing)
        return used if chain else through(p[k], used)

    def rule(k, w, g, t):
        return g + decay * (1 - spaced(w, n, m, spacing)) * w if k in SPARSE else g

    return optimize(params, data, use, rule)
