"""Layer-wise patterns found by trying them all, and training with one pattern per layer; plain torch, nothing of the package."""

import itertools

from python_tests.recipes.loop import SPARSE, masked, top_n


def cheapest(weights, loss, kept, m, budget, closest=False):
    """name -> n with the least total ``loss(w, n)`` among all choices whose share of the weights kept is at most ``budget``."""
    names, total = list(weights), sum(w.numel() for w in weights.values())
    fits = []
    for ns in itertools.product(kept, repeat=len(names)):
        share = sum(weights[k].numel() * n for k, n in zip(names, ns, strict=True)) / (m * total)
        if share <= budget + 1e-12:
            fits.append((-share if closest else 0.0, sum(loss(k, weights[k], n) for k, n in zip(names, ns, strict=True)), ns))
    return dict(zip(names, min(fits)[2], strict=True))


def erk(weights, kept, m, budget):
    """The choice closest to the budget, then to densities in proportion to (out + in)/(out · in); no bound is met on the small net."""
    scale = budget * sum(w.numel() for w in weights.values()) / sum(sum(w.shape) for w in weights.values())
    want = {k: scale * sum(w.shape) / w.numel() for k, w in weights.items()}
    assert all(min(kept) / m < d < max(kept) / m for d in want.values())
    return cheapest(weights, lambda k, w, n: w.numel() * (n / m - want[k]) ** 2, kept, m, budget, closest=True)


def magnitude(weights, kept, m, budget):
    """The least sum of pruned magnitudes."""
    return cheapest(weights, lambda k, w, n: w.abs()[~top_n(w, n, m)].sum().item(), kept, m, budget)


def srste(params, data, share, kept, m, budget, decay, **how):
    """SR-STE with the patterns that ``share`` gives the first weights."""
    ns = {}

    def begin(t, params, *moments):
        if t == 0:
            ns.update(share({k: params[k] for k in SPARSE}, kept, m, budget))

    return masked(params, data, lambda k, w, t: top_n(w, ns[k], m), decay, begin=begin, **how)
