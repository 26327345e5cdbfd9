"""An independent loop for AST (Huang et al., AAAI 2025): SR-STE whose decay is annealed and added after the momentum."""

import torch

from python_tests.recipes.loop import SPARSE, Adam, gradients, top_n


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
