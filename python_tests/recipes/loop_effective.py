"""Independent training loops of methods that change the effective weight, in plain torch; ``how`` is passed to ``optimize``.

S-STE: Hu et al., NeurIPS 2024. MdGf and SdGf: Bambhaniya et al., arXiv 2402.04744. Complementary sparsity. FST: Hu et al., ICML 2024.
V:N:M. MaxQ: Xiang et al., CVPR 2024. ASP: Mishra et al. 2021, and its channel permutation: Pool and Yu, NeurIPS 2021. Squared-ReLU
activations: Haziza et al., arXiv 2503.16672. AST: Huang et al., AAAI 2025.
The only part of the package used is the reference's estimator, to replay random draws.
"""

import functools
import itertools
import math

import torch

from nmkernels import reference
from python_tests.recipes.loop import SPARSE, Adam, gradients, masked, optimize, through, top_n


def soft(w, n, m):
    """sign(w) · max(|w| − t, 0) with t the (n+1)-th largest magnitude of each group."""
    groups = w.reshape(-1, m)
    t = groups.abs().sort(dim=1, descending=True).values[:, n : n + 1]
    return (groups.sign() * (groups.abs() - t).clamp_min(0)).reshape(w.shape)


def drawn(k, g, x, t, streams, method):
    """gᵀ x with a 2:4 estimate of g along tokens, from ``streams`` (weight name -> key); g itself without."""
    if method == "magnitude":
        g = g * top_n(g.T, 2, 4).T
    elif streams is not None:
        g = reference.mvue(g, 2, 4, 0, torch.tensor([streams[k], t]), method)
    return g.T @ x


def sste(params, data, n, m, streams=None, method="exact", **how):
    """β S(W), β of the first weights; 2:4 estimates drawn from ``streams`` (weight name -> key), or the dense GEMM without."""
    betas = {}

    def begin(t, params, *moments):
        for k in SPARSE if t == 0 else ():
            s = soft(params[k], n, m)
            betas[k] = (params[k] * s).sum() / (s * s).sum()

    def estimate(k, g, x, t):
        return drawn(k, g, x, t, streams, method) if k in SPARSE else g.T @ x

    return optimize(params, data, lambda k, p, t: through(p[k], betas[k] * soft(p[k], n, m)), begin=begin, estimate=estimate, **how)


def mdgf(params, data, n, m, schedule, dense, fine_tune, total, residual=None, chain=True, levels=None, **how):
    """W̃ = W ⊙ (M + D (1 − M)), with D from 1 to 0 between the dense and the fine-tuning steps."""
    length = total - dense - fine_tune

    def flow(t):
        u = t - dense
        if u < 0:
            return 1.0
        if u >= length:
            return 0.0
        if levels is not None:
            u = math.floor(u * levels / length) * length / levels
        return 1.0 - u / length if schedule == "linear" else math.exp(math.log(residual) * u / length)

    return masked(params, data, lambda k, w, t: flow(t) + (1 - flow(t)) * top_n(w, n, m).to(w.dtype), chain=chain, **how)


def sdgf(params, data, frames, starts, chain=False, last=None, **how):
    """Hard masks whose pattern changes: ``frames`` (n, m), each from the step in ``starts`` on; dense before the first.

    ``last`` (name -> n): no layer is sparser in a frame than it ends, and the last frame is its own.
    """

    def mask_of(k, w, t):
        now = max((i for i, start in enumerate(starts) if start <= t), default=None)
        if now is None:
            return torch.ones_like(w)
        n, m = frames[now]
        if last is not None:
            n = max(n, last[k]) if now < len(frames) - 1 else last[k]
        return top_n(w, n, m)

    return masked(params, data, mask_of, chain=chain, **how)


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
    return masked(params, data, lambda k, w, t: spaced(w, n, m, spacing), decay, chain)


# ---- FST


@functools.lru_cache
def tile_patterns(n, m):
    """Every 0/1 matrix ``(count, m, m)`` with n ones in each row and in each column."""
    rows = [[int(i in kept) for i in range(m)] for kept in itertools.combinations(range(m), n)]
    found = [p for p in itertools.product(rows, repeat=m) if all(sum(column) == n for column in zip(*p, strict=True))]
    return torch.tensor(found, dtype=torch.float64)


def transposable(w, n, m):
    """The admissible pattern of largest kept magnitude in every m x m tile, by trying all of them."""
    rows, cols = w.shape
    tiles = w.abs().double().reshape(rows // m, m, cols // m, m).transpose(1, 2)
    patterns = tile_patterns(n, m)
    best = patterns[torch.einsum("rcij,pij->rcp", tiles, patterns).argmax(-1)]
    return best.transpose(1, 2).reshape(rows, cols).bool()


def fst(params, data, n, m, refresh, decay, stop=None, streams=None, method="exact"):
    """Held masks, renewed after every ``refresh`` steps and not applied from step ``stop`` on; 2:4 estimates from ``streams``, or none."""
    masks = {}

    def begin(t, params, *moments):
        if t == stop:
            masks.clear()
        elif t % refresh == 0 and (stop is None or t < stop):
            masks.update({k: transposable(params[k], n, m).double() for k in SPARSE})

    def estimate(k, g, x, t):
        return drawn(k, g, x, t, streams if k in masks else None, method)

    return masked(params, data, lambda k, w, t: masks.get(k, torch.ones_like(w)), decay, begin=begin, estimate=estimate)


# ---- V:N:M


def retained(w, columns, n=2):
    """Σ of the n largest magnitudes of each row among ``columns``."""
    return float(w[:, list(columns)].abs().sort(dim=1, descending=True).values[:, :n].sum())


def block_columns(block, n, objective):
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
            for i in block_columns(w[top : top + v, left : left + m], n, objective):
                kept[top : top + v, left + i] = True
    return kept


def vnm(params, data, n, m, v, decay, refresh, objective="retained"):
    columns = {}

    def mask_of(k, w, t):
        if t == 0 or (refresh and t % refresh == 0):
            columns[k] = columns_of(w, n, m, v, objective)
        return columns[k] & top_n(w * columns[k], n, m)

    return masked(params, data, mask_of, decay)


# ---- MaxQ


def row_query(a, k, tau):
    """Q of one list of magnitudes: σ((a − θ)/τ) for the k largest, 0 for the rest."""
    ranked = sorted(a, reverse=True)
    theta = (ranked[k - 1] + ranked[k]) / 2
    return [1 / (1 + math.exp(-(x - theta) / tau)) if x >= ranked[k - 1] else 0.0 for x in a]


def kept_and_factor(w, n, m, share, tau, kernel):
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
        seen[k], factor = kept_and_factor(p[k].detach(), n, m, share, recipe.tau, recipe.kernel)
        used = p[k] * seen[k] * factor
        return used if recipe.gradient == "chain" else through(p[k], used)

    return optimize(params, data, use, lambda k, w, g, t: g + recipe.decay * (1 - seen[k]) * w if k in SPARSE else g)


# ---- ASP


def climb(w, m=4):
    """For every pair of stripes the best of all regroupings; the best disjoint ones are applied, until none gains."""
    stripes = [list(range(i, i + m)) for i in range(0, w.shape[1], m)]
    while True:
        offers = []
        for a, b in itertools.combinations(range(len(stripes)), 2):
            both = stripes[a] + stripes[b]
            ways = [[0, *rest] for rest in itertools.combinations(range(1, 2 * m), m - 1)]
            splits = [([both[i] for i in way], [both[i] for i in range(2 * m) if i not in way]) for way in ways]
            gain, first, second = max(((retained(w, p) + retained(w, q), p, q) for p, q in splits), key=lambda offer: offer[0])
            offers.append((gain - retained(w, stripes[a]) - retained(w, stripes[b]), a, b, first, second))
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


# ---- sparse activations


def activation(y, n, m, grad="chain"):
    """relu²(sp(y)), differentiated as it stands, or as if sp were not there."""
    sparse = (y * top_n(y.detach() - y.detach().amin(), n, m)).relu() ** 2
    return sparse if grad == "chain" else y.relu() ** 2 + (sparse - y.relu() ** 2).detach()


def act24(params, data, n, m, dense, gradient="chain"):
    """The usual net with squared ReLU, dense for ``dense`` steps, then with sparse activations."""
    return optimize(params, data, act=lambda y, t: activation(y, n, m, gradient) if t >= dense else y.relu() ** 2)


# ---- AST


def ast(params, data, n, m, decay, anneal, every, total=True, adam=None):
    """u = m̂ + λ (1 − M) w with λ rising over ``anneal`` steps, M renewed after every ``every``-th; v of u² or of (g + λ (1 − M) w)²."""
    a, params = adam or Adam(), {k: w.clone() for k, w in params.items()}
    first, second = ({k: torch.zeros_like(w) for k, w in params.items()} for _ in range(2))
    for t, batch in enumerate(data):
        if t % every == 0:
            masks = {k: top_n(params[k], n, m) for k in SPARSE}
        strength = decay * min(t / anneal, 1.0) if anneal else decay
        grads = gradients(params, batch, masks)[1]
        for k, w in params.items():
            pull = strength * w * ~masks[k] if k in SPARSE else torch.zeros_like(w)
            first[k] = a.beta1 * first[k] + (1 - a.beta1) * grads[k]
            u = first[k] / (1 - a.beta1 ** (t + 1)) + pull
            squared = u if k in SPARSE and total else grads[k] + pull
            second[k] = a.beta2 * second[k] + (1 - a.beta2) * squared**2
            d = (second[k] / (1 - a.beta2 ** (t + 1))).sqrt() + a.eps
            params[k] = w - a.lr * (u / d + a.weight_decay * w)
    return params
