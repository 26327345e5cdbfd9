"""Independent training loops of methods that change the effective weight; ``how`` is passed to ``optimize``.

S-STE: Hu et al., NeurIPS 2024. MdGf and SdGf: Bambhaniya et al., arXiv 2402.04744. Complementary sparsity.
The only part of the package used is the reference's estimator, to replay random draws.
"""

import math

import torch

from nmkernels import reference
from python_tests.recipes.loop import SPARSE, masked, optimize, through, top_n


def soft(w, n, m):
    """sign(w) · max(|w| − t, 0) with t the (n+1)-th largest magnitude of each group."""
    groups = w.reshape(-1, m)
    t = groups.abs().sort(dim=1, descending=True).values[:, n : n + 1]
    return (groups.sign() * (groups.abs() - t).clamp_min(0)).reshape(w.shape)


def sste(params, data, n, m, streams=None, method="exact", **how):
    """β S(W), β of the first weights; 2:4 estimates drawn from ``streams`` (weight name -> key), or the dense GEMM without."""
    betas = {}

    def begin(t, params, *moments):
        for k in SPARSE if t == 0 else ():
            s = soft(params[k], n, m)
            betas[k] = (params[k] * s).sum() / (s * s).sum()

    def estimate(k, g, x, t):
        if k in SPARSE and method == "magnitude":
            g = g * top_n(g.T, 2, 4).T
        elif k in SPARSE and streams is not None:
            g = reference.mvue(g, 2, 4, 0, torch.tensor([streams[k], t]), method)
        return g.T @ x

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
