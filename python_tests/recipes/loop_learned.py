"""An independent loop for methods that learn a choice of combinations beside, or instead of, the weights.

Plain torch and its autograd, from the papers' equations; of the package only what replays random draws. MaskLLM: Fang et al., NeurIPS
2024, arXiv 2409.17481. LBC: Zhang et al., NeurIPS 2022, arXiv 2206.06662.
"""

import itertools
import math

import torch
import torch.nn.functional as F

from nmkernels import reference
from nmkernels.recipes.state import stream_key
from python_tests.recipes.loop import SPARSE, Adam


def table(n, m):
    """P: one row of 0 and 1 per combination, in lexicographic order."""
    return torch.tensor([[float(i in c) for i in range(m)] for c in itertools.combinations(range(m), n)], dtype=torch.float64)


def loss_at(params, batch, used):
    at = {**params, **used}
    h = batch[0]
    for i in (0, 2, 4):
        h = F.linear(h, at[f"{i}.weight"], at[f"{i}.bias"])
        h = F.gelu(h) if i < 4 else h
    return F.mse_loss(h, batch[1])


def train_learned(params, data, used_of, trains, after=lambda params, t: None, multiplier=1.0, extra=lambda used: 0.0):
    """Adam on L(W̃) + ``extra``(W̃) with W̃ = ``used_of(leaves, t)``; ``trains(name, t)`` says which parameters have gradients."""
    a, params = Adam(), {k: v.clone() for k, v in params.items()}
    m, v = {k: torch.zeros_like(w) for k, w in params.items()}, {k: torch.zeros_like(w) for k, w in params.items()}
    for t, batch in enumerate(data):
        names = [k for k in params if trains(k, t)]
        leaves = {k: w.detach().requires_grad_(k in names) for k, w in params.items()}
        used = used_of(leaves, t)
        grads = torch.autograd.grad(loss_at(leaves, batch, used) + extra(used), [leaves[k] for k in names])
        for k, g in zip(names, grads, strict=True):
            lr = a.lr * (multiplier if "nm_" in k else 1.0)
            m[k] = a.beta1 * m[k] + (1 - a.beta1) * g
            v[k] = a.beta2 * v[k] + (1 - a.beta2) * g * g
            d = (v[k] / (1 - a.beta2 ** (t + 1))).sqrt() + a.eps
            params[k] = params[k] * (1 - lr * a.weight_decay) - lr * m[k] / (1 - a.beta1 ** (t + 1)) / d
        after(params, t + 1)
    return params


# ---- MaskLLM


def noise(seed, name, t, shape):
    """The Gumbel numbers of a layer before step t + 1."""
    key = stream_key(seed, f"held/{t}/{name}", 0) & (2**63 - 1)
    draw = torch.randint(-(2**63), 2**63 - 1, (2,), generator=torch.Generator().manual_seed(key))
    words = reference.uniforms24(draw, math.prod(shape)).reshape(shape)
    return -(-((words.double() + 0.5) / 2.0**24).log()).log()


def maskllm(params, data, recipe, total):
    """All of ``recipe``'s options; only the logits train, or everything but the swapped weights."""
    p, r = table(recipe.pattern.n, recipe.pattern.m), recipe

    def used_of(leaves, t):
        tau = r.tau_start + (r.tau_end - r.tau_start) * t / total
        kappa = r.kappa_start + (r.kappa_end - r.kappa_start) * t / total
        used = {}
        for k in SPARSE:
            name = k.removesuffix(".weight")
            logits = leaves[f"{name}.nm_logits"]
            y = ((kappa * logits + noise(r.seed, name, t, logits.shape)) / tau).softmax(1)
            if r.hard:
                y = y + (F.one_hot(y.argmax(1), y.shape[1]) - y).detach()
            used[k] = leaves[k] * (y @ p).reshape(leaves[k].shape)
        used_of.t = t
        return used

    def extra(used):
        scale = 1 - used_of.t / total if r.decay_schedule == "linear" else 1.0
        return -r.decay * scale * sum(used[k].square().sum() for k in SPARSE)

    def trains(k, t):
        return "nm_" in k or (r.others == "trained" and k not in SPARSE)

    return train_learned(params, data, used_of, trains, multiplier=r.lr_multiplier, extra=extra)


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

    def remove(params, t):
        for k in SPARSE:
            for group, left in enumerate(alive[k]):
                alpha = params[scores_of(k)][group].tolist()
                while len(left) > remaining(t):
                    left.remove(min(left, key=lambda c: (alpha[c], -c)))

    def used_of(leaves, t):
        used = {}
        for k in SPARSE:
            w, alpha = leaves[k], leaves[scores_of(k)]
            on = torch.tensor([[float(c in left) for c in range(len(p))] for left in alive[k]], dtype=torch.float64)
            soft = (alpha * on) @ p
            if recipe.forward == "union":
                binary = (on @ p > 0).double()
            else:
                best = soft.detach().argsort(dim=1, descending=True, stable=True)[:, :n]
                binary = torch.zeros_like(soft).scatter(1, best, 1.0).detach()
            through = (binary + soft - soft.detach()).reshape(w.shape)
            used[k] = w * through if recipe.gradient == "chain" else w.detach() * through + w - w.detach()
        return used

    return train_learned(params, data, used_of, lambda k, t: "nm_" not in k or remaining(t) > 1, remove)
