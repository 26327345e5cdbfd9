"""ASP, with a channel permutation too, by an independent loop in plain torch: Mishra et al. 2021; Pool and Yu, NeurIPS 2021."""

from itertools import combinations

from python_tests.recipes.loop import SPARSE, optimize, top_n


def magnitude_kept(w, columns, n=2):
    """Σ of the n largest magnitudes of each row among ``columns``."""
    return w[:, columns].abs().sort(dim=1, descending=True).values[:, :n].sum().item()


def climb(w, m=4):
    """For every pair of stripes the best of all regroupings; the best disjoint ones are applied, until none gains."""
    stripes = [list(range(i, i + m)) for i in range(0, w.shape[1], m)]
    while True:
        offers = []
        for a, b in combinations(range(len(stripes)), 2):
            both = stripes[a] + stripes[b]
            ways = [[0, *rest] for rest in combinations(range(1, 2 * m), m - 1)]
            splits = [([both[i] for i in way], [both[i] for i in range(2 * m) if i not in way]) for way in ways]
            gain, first, second = max(((magnitude_kept(w, p) + magnitude_kept(w, q), p, q) for p, q in splits), key=lambda offer: offer[0])
            offers.append((gain - magnitude_kept(w, stripes[a]) - magnitude_kept(w, stripes[b]), a, b, first, second))
        taken = set()
        for gain, a, b, first, second in sorted(offers, key=lambda offer: -offer[0]):
            if gain > 1e-9 * w.abs().sum() and not taken & {a, b}:
                stripes[a], stripes[b], taken = first, second, taken | {a, b}
        if not taken:
            return [column for stripe in sorted(sorted(stripe) for stripe in stripes) for column in stripe]


def asp(params, data, prune_at=0, permute=False, **how):
    """g ← g ⊙ M and W ← W ⊙ M from step ``prune_at`` on, with the mask of that moment.

    With ``permute`` the channels between layers 0 and 2 are first put in the order that suits layer 2, with their moments; those between
    2 and 4 stay, as 4 is not pruned.
    """
    masks = {}

    def begin(t, *tensors):
        if t == prune_at and permute:
            order = climb(tensors[0]["2.weight"])
            for part in tensors:
                part.update({k: part[k][order] for k in ("0.weight", "0.bias")}, **{"2.weight": part["2.weight"][:, order]})
        if t == prune_at:
            masks.update({k: top_n(tensors[0][k], 2, 4).double() for k in SPARSE})

    end = optimize(params, data, lambda k, p, t: p[k] * masks.get(k, 1.0), begin=begin, **how)
    return {k: w * masks.get(k, 1.0) for k, w in end.items()}
