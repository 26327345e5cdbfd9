"""Independent loops of the methods whose ∂L/∂x multiplies another weight: Bi-Mask (Zhang et al., ICML 2023), SLoPe (ICLR 2025).

Plain torch from the papers' equations; of the package only the keys of its random streams, to replay the draws.
"""

import torch
import torch.nn.functional as F

from nmkernels.recipes.state import stream_key
from python_tests.recipes.loop import SPARSE, Adam, top_n


def forward_backward(params, batch, used, transposed, adapters=None):
    """(∂L/∂W̃ of each layer, gradients of biases and adapters) of the three-layer net by hand.

    ``used`` and ``transposed`` (weight name -> weight) are what y = x W̃ᵀ and ∂L/∂x multiply; ``adapters`` (weight name -> (L, R)) add
    x L R / r.
    """
    h, inputs, outs = batch[0], {}, {}
    for i in (0, 2, 4):
        k = f"{i}.weight"
        inputs[k] = h
        y = h @ used.get(k, params[k]).T + params[f"{i}.bias"]
        if adapters and k in adapters:
            left, right = adapters[k]
            y = y + h @ left @ right / left.shape[1]
        outs[k], h = y, F.gelu(y) if i < 4 else y
    g = 2 * (h - batch[1]) / h.numel()
    weights, rest = {}, {}
    for i in (4, 2, 0):
        k = f"{i}.weight"
        if i < 4:
            y = outs[k].detach().requires_grad_()
            (g,) = torch.autograd.grad(F.gelu(y), y, g)
        weights[k], rest[f"{i}.bias"] = g.T @ inputs[k], g.sum(0)
        back = g @ transposed.get(k, params[k])
        if adapters and k in adapters:
            left, right = adapters[k]
            r = left.shape[1]
            rest[f"{i}.nm_left"], rest[f"{i}.nm_right"] = inputs[k].T @ g @ right.T / r, (inputs[k] @ left).T @ g / r
            back = back + g @ right.T @ left.T / r
        g = back
    return weights, rest


class AdamW:
    """AdamW over a dictionary of tensors, each counting its own steps from its first gradient on."""

    def __init__(self, params, adam=None):
        self.params, self.a = params, adam or Adam()
        self.state = {}

    def step(self, grads):
        a = self.a
        for k, g in grads.items():
            m, v, t = self.state.get(k, (0.0, 0.0, 0))
            m, v, t = a.beta1 * m + (1 - a.beta1) * g, a.beta2 * v + (1 - a.beta2) * g * g, t + 1
            self.state[k] = m, v, t
            d = (v / (1 - a.beta2**t)).sqrt() + a.eps
            self.params[k] = self.params[k] * (1 - a.lr * a.weight_decay) - a.lr * m / (1 - a.beta1**t) / d


def columns(w, n, m):
    """True at the n largest magnitudes of each m consecutive rows of a column; a short last group keeps n of its rows."""
    mask = torch.zeros_like(w, dtype=torch.bool)
    for start in range(0, w.shape[0], m):
        block = w[start : start + m].abs()
        best = block.argsort(dim=0, descending=True, stable=True)[: min(n, len(block))]
        mask[start : start + m] = torch.zeros_like(block, dtype=torch.bool).scatter(0, best, True)
    return mask


# ---- Bi-Mask


def backward_mask(masked, order, n, m):
    """b_b: the columns' mask of the permuted rows, put back in their places."""
    back = torch.zeros_like(masked, dtype=torch.bool)
    back[order] = columns(masked[order], n, m)
    return back & (masked != 0)


def best_order(masked, n, m, draws, generator, count):
    best, most = None, -1.0
    for _ in range(draws):
        order = torch.randperm(masked.shape[0], generator=generator)
        kept = backward_mask(masked, order, n, m)
        score = float(kept.sum()) if count else float(masked[kept].abs().sum())
        if score > most:
            best, most = order, score
    return best if best is not None else torch.arange(masked.shape[0])


def bimask(params, data, n, m, decay, draws, refresh, seed, count=False):
    params, orders = {k: v.clone() for k, v in params.items()}, {}
    adam = AdamW(params)
    for t, batch in enumerate(data):
        used, transposed, masks = {}, {}, {}
        for k in SPARSE:
            masks[k] = top_n(params[k], n, m)
            used[k] = params[k] * masks[k]
            if t == 0 or (refresh and t % refresh == 0):
                key = stream_key(seed, f"held/{t}/{k.removesuffix('.weight')}", 0) % 2**63
                orders[k] = best_order(used[k], n, m, draws, torch.Generator().manual_seed(key), count)
            transposed[k] = used[k] * backward_mask(used[k], orders[k], n, m)
        weights, rest = forward_backward(params, batch, used, transposed)
        for k in SPARSE:
            weights[k] = weights[k] + decay * params[k] * ~masks[k]
        adam.step({**weights, **rest})
    return params


# ---- SLoPe


def slope(params, data, n, m, refresh, first=None, rank=0, seed=0):
    """Masks of the initial weight; ``columns`` of it anew every ``refresh`` steps; adapters of ``rank`` from step ``first`` on."""
    params, rows, cols, adapters = {k: v.clone() for k, v in params.items()}, {}, {}, {}
    for k in SPARSE:
        rows[k] = top_n(params[k], n, m)
        params[k] = params[k] * rows[k]
        if rank:
            layer = k.removesuffix(".weight")
            key = stream_key(seed, f"adapter/{layer}", 0) % 2**63
            left = torch.randn(params[k].shape[1], rank, generator=torch.Generator().manual_seed(key), dtype=torch.float64)
            params[f"{layer}.nm_left"], params[f"{layer}.nm_right"] = left, torch.zeros(rank, len(params[k]), dtype=torch.float64)
    adam = AdamW(params)
    for t, batch in enumerate(data):
        for k in SPARSE:
            if t == 0 or (refresh and t % refresh == 0):
                cols[k] = columns(params[k], n, m)
            if first is not None and t >= first:
                layer = k.removesuffix(".weight")
                adapters[k] = params[f"{layer}.nm_left"], params[f"{layer}.nm_right"]
        weights, rest = forward_backward(params, batch, {}, {k: params[k] * cols[k] for k in SPARSE}, adapters)
        adam.step({**{k: g * rows[k] if k in rows else g for k, g in weights.items()}, **rest})
    return params
