"""ASP with a channel permutation by an independent loop in plain torch: Mishra et al. 2021; Pool and Yu, NeurIPS 2021."""

from itertools import combinations

import torch

from python_tests.recipes.loop import SPARSE, Adam, gradients, top_n


def kept(w, columns, n=2):
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
            gain, first, second = max(((kept(w, p) + kept(w, q), p, q) for p, q in splits), key=lambda offer: offer[0])
            offers.append((gain - kept(w, stripes[a]) - kept(w, stripes[b]), a, b, first, second))
        taken = set()
        for gain, a, b, first, second in sorted(offers, key=lambda offer: -offer[0]):
            if gain > 1e-9 * w.abs().sum() and not taken & {a, b}:
                stripes[a], stripes[b], taken = first, second, taken | {a, b}
        if not taken:
            return [column for stripe in sorted(sorted(stripe) for stripe in stripes) for column in stripe]


def permuted(params, data, prune_at):
    """Dense Adam; before step ``prune_at`` the channels between layers 0 and 2 are put in the order that suits layer 2, with their
    moments, and both are pruned; then g ← g ⊙ M, step, W ← W ⊙ M. The channels between 2 and 4 stay: 4 is not pruned."""
    a, params = Adam(), {k: v.clone() for k, v in params.items()}
    m, v = ({k: torch.zeros_like(w) for k, w in params.items()} for _ in "mv")
    masks = {}
    for t, batch in enumerate(data):
        if t == prune_at:
            order = climb(params["2.weight"])
            for tensors in (params, m, v):
                tensors.update({k: tensors[k][order] for k in ("0.weight", "0.bias")}, **{"2.weight": tensors["2.weight"][:, order]})
            masks = {k: top_n(params[k], 2, 4) for k in SPARSE}
            params.update({k: params[k] * masks[k] for k in SPARSE})
        _, grads = gradients(params, batch, masks)
        for k, w in params.items():
            g = grads[k] * masks.get(k, 1.0)
            m[k] = a.beta1 * m[k] + (1 - a.beta1) * g
            v[k] = a.beta2 * v[k] + (1 - a.beta2) * g * g
            d = (v[k] / (1 - a.beta2 ** (t + 1))).sqrt() + a.eps
            params[k] = (w * (1 - a.lr * a.weight_decay) - a.lr * m[k] / (1 - a.beta1 ** (t + 1)) / d) * masks.get(k, 1.0)
    return params
