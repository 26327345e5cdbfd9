"""Layer-wise patterns found by trying them all, and training with one pattern per layer; plain torch, nothing of the package."""

import itertools

from python_tests.recipes.loop import SPARSE, top_n
from python_tests.recipes.loop_inner import step_then
from python_tests.recipes.loop_used import train_used


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


def srste(params, data, share, kept, m, budget, decay):
    """SR-STE with the patterns of the first weights."""
    ns = share({k: params[k] for k in SPARSE}, kept, m, budget)
    rule = lambda k, w, g, t: g + decay * w * ~top_n(w, ns[k], m)  # noqa: E731
    return train_used(params, data, lambda k, w, t: w * top_n(w, ns[k], m), rule)


def sdgf(params, data, share, kept, m, budget, frames, starts):
    """Frames of n of m; no layer is sparser in one than it ends, and the last is its own."""
    ns = share({k: params[k] for k in SPARSE}, kept, m, budget)

    def use(k, w, t):
        now = max(i for i, start in enumerate(starts) if start <= t)
        return w * top_n(w, max(frames[now], ns[k]) if now < len(frames) - 1 else ns[k], m)

    return train_used(params, data, use)


def step_ste(params, data, at, share, kept, m, budget):
    """STEP with the patterns of the weights of the switch."""
    ns = {}
    begin = lambda params: ns.update(share({k: params[k] for k in SPARSE}, kept, m, budget))  # noqa: E731
    return step_then(params, data, at, lambda k, w, u: w * top_n(w, ns[k], m), begin=begin)
