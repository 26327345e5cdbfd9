"""An independent loop for AST (Huang et al., AAAI 2025): SR-STE whose decay is annealed and added after the momentum."""

import torch

from python_tests.recipes.loop import SPARSE, Adam, top_n
from python_tests.recipes.loop_used import backprop


def ast(params, data, n, m, decay, anneal, every, total=True, adam=None):
    """u = m̂ + λ (1 − M) w with λ rising over ``anneal`` steps, M renewed after every ``every``-th; v of u² or of (g + λ (1 − M) w)²."""
    a, params = adam or Adam(), {k: w.clone() for k, w in params.items()}
    first, second = ({k: torch.zeros_like(w) for k, w in params.items()} for _ in range(2))
    masks = {k: top_n(params[k], n, m) for k in SPARSE}
    for t, batch in enumerate(data):
        strength = decay * min(t / anneal, 1.0) if anneal else decay
        inputs, outputs, grads = backprop(params, batch, {k: params[k] * masks[k] for k in SPARSE})
        for k, w in params.items():
            g = outputs[k].T @ inputs[k] if k in SPARSE else grads[k]
            pull = strength * w * ~masks[k] if k in SPARSE else torch.zeros_like(w)
            first[k] = a.beta1 * first[k] + (1 - a.beta1) * g
            u = first[k] / (1 - a.beta1 ** (t + 1)) + pull
            squared = u if k in SPARSE and total else g + pull
            second[k] = a.beta2 * second[k] + (1 - a.beta2) * squared**2
            d = (second[k] / (1 - a.beta2 ** (t + 1))).sqrt() + a.eps
            params[k] = w - a.lr * (u / d + a.weight_decay * w)
        if (t + 1) % every == 0:
            masks = {k: top_n(params[k], n, m) for k in SPARSE}
    return params
