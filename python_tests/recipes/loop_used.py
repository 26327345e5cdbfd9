"""A second independent loop, for methods that differ in the effective weight and in the rule of its gradient.

Plain torch from the papers' equations; of the package only the reference's estimator, to replay random draws. Adam as in ``loop``.
S-STE: Hu et al., NeurIPS 2024. MdGf and SdGf: Bambhaniya et al., arXiv 2402.04744.
"""

import math

import torch
import torch.nn.functional as F

from nmkernels import reference
from python_tests.recipes.loop import SPARSE, Adam, top_n


def backprop(params, batch, used):
    """(layer inputs, gradients of layer outputs, gradients of the rest) of the three-layer net at the weights ``used``."""
    leaves = {k: used.get(k, v).detach().requires_grad_() for k, v in params.items()}
    h, inputs, outputs = batch[0], {}, {}
    for i in (0, 2, 4):
        inputs[f"{i}.weight"] = h.detach()
        y = outputs[f"{i}.weight"] = F.linear(h, leaves[f"{i}.weight"], leaves[f"{i}.bias"])
        h = F.gelu(y) if i < 4 else y
    loss = F.mse_loss(h, batch[1])
    rest = [k for k in params if k not in SPARSE]
    grads = torch.autograd.grad(loss, [*outputs.values(), *(leaves[k] for k in rest)])
    return inputs, dict(zip(outputs, grads[:3], strict=True)), dict(zip(rest, grads[3:], strict=True))


def train_used(params, data, use, rule=lambda k, w, g, t: g, gemm=lambda k, g, x, t: g.T @ x, adam=None):
    """Adam on the gradient ``rule(k, w, ∂L/∂W̃, t)`` at W̃ = ``use(k, w, t)``; ``gemm`` makes ∂L/∂W̃ of a layer; t counts from 0."""
    a, params = adam or Adam(), {k: v.clone() for k, v in params.items()}
    m = {k: torch.zeros_like(v) for k, v in params.items()}
    v = {k: torch.zeros_like(w) for k, w in params.items()}
    for t, batch in enumerate(data):
        inputs, outputs, grads = backprop(params, batch, {k: use(k, params[k], t) for k in SPARSE})
        for k, w in params.items():
            g = rule(k, w, gemm(k, outputs[k], inputs[k], t), t) if k in SPARSE else grads[k]
            m[k] = a.beta1 * m[k] + (1 - a.beta1) * g
            v[k] = a.beta2 * v[k] + (1 - a.beta2) * g * g
            d = (v[k] / (1 - a.beta2 ** (t + 1))).sqrt() + a.eps
            params[k] = w * (1 - a.lr * a.weight_decay) - a.lr * m[k] / (1 - a.beta1 ** (t + 1)) / d
    return params


# ---- S-STE


def soft(w, n, m):
    """sign(w) · max(|w| − t, 0) with t the (n+1)-th largest magnitude of each group."""
    groups = w.reshape(-1, m)
    t = groups.abs().sort(dim=1, descending=True).values[:, n : n + 1]
    return (groups.sign() * (groups.abs() - t).clamp_min(0)).reshape(w.shape)


def sste(params, data, n, m, streams=None, method="exact"):
    """S-STE with 2:4 estimates drawn from ``streams`` (weight name -> key), or the dense GEMM without."""
    betas = {}
    for k in SPARSE:
        s = soft(params[k], n, m)
        betas[k] = (params[k] * s).sum() / (s * s).sum()

    def gemm(k, g, x, t):
        if method == "magnitude":
            g = g * top_n(g.T, 2, 4).T
        elif streams is not None:
            g = reference.mvue(g, 2, 4, 0, torch.tensor([streams[k], t]), method)
        return g.T @ x

    return train_used(params, data, lambda k, w, t: betas[k] * soft(w, n, m), gemm=gemm)


# ---- MdGf and SdGf


def mdgf(params, data, n, m, schedule, dense, fine_tune, total, residual=None, chain=True, levels=None):
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

    def factor(w, t):
        kept = top_n(w, n, m).to(w.dtype)
        return kept + flow(t) * (1 - kept)

    return train_used(params, data, lambda k, w, t: w * factor(w, t), lambda k, w, g, t: g * factor(w, t) if chain else g)


def sdgf(params, data, frames, starts, chain=False):
    """Hard masks whose pattern changes: ``frames`` (n, m), each from the step in ``starts`` on; dense before the first."""

    def mask(w, t):
        now = [pattern for pattern, start in zip(frames, starts, strict=True) if start <= t]
        return top_n(w, *now[-1]).to(w.dtype) if now else torch.ones_like(w)

    return train_used(params, data, lambda k, w, t: w * mask(w, t), lambda k, w, g, t: g * mask(w, t) if chain else g)
