"""An independent loop for ProxSparse (Liu et al., ICML 2025): its proximal step by descent from many points, then Newton's method."""

import itertools

import torch

from python_tests.recipes.loop import SPARSE, optimize


def objective(w, v, strength):
    """½‖w − v‖² + λ Σ |w_i w_j w_k| over the triples, for rows of four."""
    triples = sum((w[:, i] * w[:, j] * w[:, k]).abs() for i, j, k in itertools.combinations(range(4), 3))
    return (w - v).square().sum(1) / 2 + strength * triples


def descend(w, v, strength, order, sweeps):
    """Exact minimisation over one coordinate after the other; v and w are not negative."""
    w = w.clone()
    for _ in range(sweeps):
        for i in order:
            a, b, c = (w[:, j] for j in range(4) if j != i)
            w[:, i] = (v[:, i] - strength * (a * b + b * c + c * a)).clamp_min(0)
    return w


def polish(w, v, strength):
    """Newton's method over the coordinates that are not zero."""
    pairs = [(i, j, *(k for k in range(4) if k not in (i, j))) for i in range(4) for j in range(4) if i != j]
    for _ in range(6):
        on = (w > 0).to(w.dtype)
        gradient, hessian = w - v, torch.eye(4, dtype=w.dtype).repeat(len(w), 1, 1)
        for i, j, k, m in pairs:
            gradient[:, i] += strength * w[:, k] * w[:, m]  # each pair of the three others once: j runs over the third
            hessian[:, i, j] = strength * (w[:, k] + w[:, m]) * on[:, i] * on[:, j]
        w = w - torch.linalg.solve(hessian, gradient * on)
    return w.clamp_min(0)


def brute(v, strength, starts=8, sweeps=60, seed=0):
    """The proximal step of rows of four: the best of many descents, and of keeping every pair unchanged."""
    size, random = v.abs(), torch.Generator().manual_seed(seed)
    points = [size * 0, size / 2, size, *(size * torch.rand(size.shape, generator=random, dtype=size.dtype) for _ in range(starts))]
    orders = list(itertools.permutations(range(4)))
    found = [descend(w, size, strength, orders[(7 * i) % 24], sweeps) for i, w in enumerate(points)]
    found += [polish(w, size, strength) for w in found]
    for pair in itertools.combinations(range(4), 2):
        found.append(size * torch.tensor([float(i in pair) for i in range(4)], dtype=size.dtype))
    scores = torch.stack([objective(w, size, strength).nan_to_num(torch.inf) for w in found])
    best = torch.stack(found)[scores.argmin(0), torch.arange(len(size))]
    return best * v.sign()


def proxsparse(params, data, strength, anchor=0.0, epsilon=0.1):
    """The regularised weights after AdamW and the proximal step, batch after batch."""
    first = {k: v.clone() for k, v in params.items()}

    def rule(k, w, g, t):
        if k not in SPARSE or not anchor or t == 0:  # the norm has no gradient at 0, its square's is 0
            return g
        at, sign = w.clone().requires_grad_(), torch.where(first[k] >= 0, 1.0, -1.0).to(w)
        term = anchor * ((at / (first[k] + epsilon * sign)) * (at - first[k])).norm() ** 2
        return g + torch.autograd.grad(term, at)[0]

    def after(t, params):
        params.update({k: brute(params[k].reshape(-1, 4), strength, starts=3, sweeps=25).reshape(params[k].shape) for k in SPARSE})

    return optimize(params, data, rule=rule, after=after)
