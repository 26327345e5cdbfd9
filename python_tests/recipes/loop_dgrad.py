"""Independent loops of the methods whose ∂L/∂x multiplies another weight: Bi-Mask (Zhang et al., ICML 2023), SLoPe (ICLR 2025).

Plain torch from the papers' equations; of the package only the keys of its random streams, to replay the draws.
"""

import torch

from nmkernels.recipes.contract import stream_key
from python_tests.recipes.loop import SPARSE, masked, optimize, top_n


def columns(w, n, m):
    """True at the n largest magnitudes of each m consecutive rows of a column; a short last group keeps n of its rows."""
    mask = torch.zeros_like(w, dtype=torch.bool)
    for start in range(0, w.shape[0], m):
        block = w[start : start + m].abs()
        best = block.argsort(dim=0, descending=True, stable=True)[: min(n, len(block))]
        mask[start : start + m] = torch.zeros_like(block, dtype=torch.bool).scatter(0, best, True)
    return mask


# ---- Bi-Mask


def backward_mask(masked, order, n, m):
    """b_b: the columns' mask of the permuted rows, put back in their places."""
    back = torch.zeros_like(masked, dtype=torch.bool)
    back[order] = columns(masked[order], n, m)
    return back & (masked != 0)


def best_order(masked, n, m, draws, generator, count):
    best, most = None, -1.0
    for _ in range(draws):
        order = torch.randperm(masked.shape[0], generator=generator)
        kept = backward_mask(masked, order, n, m)
        score = float(kept.sum()) if count else float(masked[kept].abs().sum())
        if score > most:
            best, most = order, score
    return best if best is not None else torch.arange(masked.shape[0])


def generator(seed, what):
    return torch.Generator().manual_seed(stream_key(seed, what, 0) % 2**63)


def bimask(params, data, recipe):
    n, m, orders = recipe.pattern.n, recipe.pattern.m, {}

    def back(used, t):
        for k, w in used.items():
            if t == 0 or (recipe.every and t % recipe.every == 0):
                random = generator(recipe.seed, f"held/{t}/{k.removesuffix('.weight')}")
                orders[k] = best_order(w.detach(), n, m, recipe.draws, random, recipe.criterion == "count")
        return {k: w * backward_mask(w.detach(), orders[k], n, m) for k, w in used.items()}

    return masked(params, data, lambda k, w, t: top_n(w, n, m), recipe.decay, back=back)


# ---- SLoPe


def slope(params, data, recipe, first=None):
    """Masks of the initial weight; column masks renewed every ``columns`` steps; adapters from step ``first`` on."""
    n, m, rank, params, rows, cols = recipe.pattern.n, recipe.pattern.m, recipe.rank, dict(params), {}, {}
    for k in SPARSE:
        rows[k], layer = top_n(params[k], n, m), k.removesuffix(".weight")
        params[k] = params[k] * rows[k]
        if rank:
            random = generator(recipe.seed, f"adapter/{layer}")
            params[f"{layer}.nm_left"] = torch.randn(params[k].shape[1], rank, generator=random, dtype=torch.float64)
            params[f"{layer}.nm_right"] = torch.zeros(rank, len(params[k]), dtype=torch.float64)

    def begin(t, params, *moments):
        if t == 0 or (recipe.every and t % recipe.every == 0):
            cols.update({k: columns(params[k], n, m) for k in SPARSE})

    def back(used, t):
        return {k: w * cols[k] for k, w in used.items()}

    return optimize(
        params, data, lambda k, p, t: p[k] * rows[k], begin=begin, back=back, adapters=lambda t: first is not None and t >= first
    )
