"""An independent loop for methods that learn a choice of combinations in addition to, or instead of, the weights.

Plain torch and its autograd, from the papers' equations; of the package only what replays random draws. MaskLLM: Fang et al., NeurIPS
2024, arXiv 2409.17481. LBC: Zhang et al., NeurIPS 2022, arXiv 2206.06662.
"""

import itertools
import math

import torch
import torch.nn.functional as F

from nmkernels import reference
from nmkernels.recipes.contract import stream_key
from python_tests.recipes.loop import SPARSE, optimize, through


def table(n, m):
    """P: one row of 0 and 1 per combination, in lexicographic order."""
    return torch.tensor([[float(i in c) for i in range(m)] for c in itertools.combinations(range(m), n)], dtype=torch.float64)


# ---- MaskLLM


def noise(seed, name, t, shape):
    """The Gumbel numbers of a layer before step t + 1."""
    key = stream_key(seed, f"held/{t}/{name}", 0) & (2**63 - 1)
    draw = torch.randint(-(2**63), 2**63 - 1, (2,), generator=torch.Generator().manual_seed(key))
    words = reference.uniforms24(draw, math.prod(shape)).reshape(shape)
    return -(-((words.double() + 0.5) / 2.0**24).log()).log()


def maskllm(params, data, recipe):
    """All of ``recipe``'s options; only the logits train, or everything but the swapped weights."""
    p, r, total = table(recipe.pattern.n, recipe.pattern.m), recipe, len(data)

    def use(k, leaves, t):
        tau = r.tau_start + (r.tau_end - r.tau_start) * t / total
        kappa = r.kappa_start + (r.kappa_end - r.kappa_start) * t / total
        name = k.removesuffix(".weight")
        logits = leaves[f"{name}.nm_logits"]
        y = ((kappa * logits + noise(r.seed, name, t, logits.shape)) / tau).softmax(1)
        if r.hard:
            y = y + (F.one_hot(y.argmax(1), y.shape[1]) - y).detach()
        return leaves[k] * (y @ p).reshape(leaves[k].shape)

    def extra(used, t):
        scale = 1 - t / total if r.decay_schedule == "linear" else 1.0
        return -r.decay * scale * sum(w.square().sum() for w in used.values())

    def rule(k, w, g, t):
        return g if "nm_" in k or (r.others == "trained" and k not in SPARSE) else None

    return optimize(params, data, use, rule, extra=extra, multiplier=r.lr_multiplier)


# ---- LBC


def lbc(params, data, recipe, t_i, t_f):
    """Weights and scores together; the smallest scores go as the schedule says."""
    n, m = recipe.pattern.n, recipe.pattern.m
    p = table(n, m)
    alive = {k: [set(range(len(p))) for _ in range(params[k].numel() // m)] for k in SPARSE}

    def remaining(t):
        x = min(max((t - t_i) / (t_f - t_i), 0.0), 1.0)
        return 1 + math.ceil((len(p) - 1) * (1 - x) ** recipe.exponent - 1e-9)

    def scores_of(k):
        return k.replace("weight", "nm_scores")

    def after(t, params):
        for k in SPARSE:
            for group, left in enumerate(alive[k]):
                alpha = params[scores_of(k)][group].tolist()
                while len(left) > remaining(t + 1):
                    left.remove(min(left, key=lambda c: (alpha[c], -c)))

    def use(k, leaves, t):
        w, alpha = leaves[k], leaves[scores_of(k)]
        on = torch.tensor([[float(c in left) for c in range(len(p))] for left in alive[k]], dtype=torch.float64)
        soft = (alpha * on) @ p
        if recipe.forward == "union":
            binary = (on @ p > 0).double()
        else:
            best = soft.detach().argsort(dim=1, descending=True, stable=True)[:, :n]
            binary = torch.zeros_like(soft).scatter(1, best, 1.0).detach()
        mask = through(soft, binary).reshape(w.shape)
        return w * mask if recipe.gradient == "chain" else w.detach() * mask + w - w.detach()

    return optimize(params, data, use, lambda k, w, g, t: g if "nm_" not in k or remaining(t) > 1 else None, after=after)
