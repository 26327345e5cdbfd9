"""An independent loop of V:N:M training: columns by plain search in each block, N:M inside them; of the package nothing."""

import itertools

import torch

from python_tests.recipes.loop import masked, top_n


def retained(block, columns, n):
    """Σ over rows of the n largest magnitudes among ``columns`` of a block (V, M)."""
    return float(block[:, list(columns)].abs().sort(dim=1, descending=True).values[:, :n].sum())


def search(block, n, objective):
    """The 4 columns of one block (V, M)."""
    m = block.shape[1]
    if objective == "sums":
        return sorted(range(m), key=lambda i: (-float(block[:, i].abs().sum()), i))[:4]
    if m <= 8:
        return max(itertools.combinations(range(m), 4), key=lambda c: retained(block, c, n))
    chosen = []
    for _ in range(4):
        chosen.append(max((i for i in range(m) if i not in chosen), key=lambda i: retained(block, [*chosen, i], n)))
    return chosen


def columns_of(w, n, m, v, objective="retained"):
    """True in the 4 columns that each block of v rows keeps of every group."""
    kept = torch.zeros_like(w, dtype=torch.bool)
    for top in range(0, w.shape[0], v):
        for left in range(0, w.shape[1], m):
            for i in search(w[top : top + v, left : left + m], n, objective):
                kept[top : top + v, left + i] = True
    return kept


def vnm(params, data, n, m, v, decay, refresh, objective="retained"):
    columns = {}

    def mask_of(k, w, t):
        if t == 0 or (refresh and t % refresh == 0):
            columns[k] = columns_of(w, n, m, v, objective)
        return columns[k] & top_n(w * columns[k], n, m)

    return masked(params, data, mask_of, decay)
