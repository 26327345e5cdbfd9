"""Independent loops of STEP with another method in its second phase: dense Adam up to T₀, then that method with the second moment frozen.

STEP: Lu et al., ICML 2023, algorithm 2. The methods' own forward weights are those of ``loop_used``.
"""

import math

from python_tests.recipes.loop import SPARSE, Adam, top_n
from python_tests.recipes.loop_used import backprop, soft


def step_then(params, data, at, use, rule=lambda k, w, g, u: g, begin=lambda params: None, clamp=2.0, adam=None):
    """Dense for ``at`` steps; then W̃ = ``use(k, w, u)`` and gradient ``rule(k, w, g, u)``, u steps after the switch, with v = v_at.

    ``begin`` sees the weights of the switch. The update m̂/D, D from the bias-corrected v of the switch, is clamped.
    """
    a, params = adam or Adam(), {k: v.clone() for k, v in params.items()}
    m = {k: 0 * v for k, v in params.items()}
    v = {k: 0 * w for k, w in params.items()}
    for t, batch in enumerate(data):
        if t == at:
            begin(params)
        inputs, outputs, rest = backprop(params, batch, {k: use(k, params[k], t - at) for k in SPARSE} if t >= at else {})
        for k, w in params.items():
            g, frozen = outputs[k].T @ inputs[k] if k in SPARSE else rest[k], k in SPARSE and t >= at
            if frozen:
                g = rule(k, w, g, t - at)
            else:
                v[k] = a.beta2 * v[k] + (1 - a.beta2) * g * g
            m[k] = a.beta1 * m[k] + (1 - a.beta1) * g
            d = (v[k] / (1 - a.beta2 ** (at if frozen else t + 1))).sqrt() + a.eps
            u = m[k] / (1 - a.beta1 ** (t + 1)) / d
            params[k] = w * (1 - a.lr * a.weight_decay) - a.lr * (u.clamp(-clamp, clamp) if frozen else u)
    return params


def step_mdgf(params, data, at, n, m, fine_tune, end=2.5e-3):
    """Pruned weights and their gradient fade by D(u) = end^(u/T), T the steps between the switch and the fine-tuning."""
    length = len(data) - at - fine_tune

    def factor(w, u):
        kept = top_n(w, n, m).to(w.dtype)
        return kept + (math.exp(math.log(end) * u / length) if u < length else 0.0) * (1 - kept)

    return step_then(params, data, at, lambda k, w, u: w * factor(w, u), lambda k, w, g, u: g * factor(w, u))


def step_sdgf(params, data, at, frames):
    """Hard masks of ``frames`` (n, m), each for an equal part of the steps after the switch."""
    length = len(data) - at

    def use(k, w, u):
        now = max(i for i in range(len(frames)) if round(i * length / len(frames)) <= u)
        return w * top_n(w, *frames[now])

    return step_then(params, data, at, use)


def step_sste(params, data, at, n, m):
    """β S(W), β from the weights of the switch."""
    betas = {}

    def begin(params):
        for k in SPARSE:
            s = soft(params[k], n, m)
            betas[k] = (params[k] * s).sum() / (s * s).sum()

    return step_then(params, data, at, lambda k, w, u: betas[k] * soft(w, n, m), begin=begin)


def step_asp(params, data, at, n, m):
    """The mask of the switch, held: g ⊙ M, W ⊙ M."""
    masks = {}

    def begin(params):
        for k in SPARSE:
            masks[k] = top_n(params[k], n, m)
            params[k] = params[k] * masks[k]

    end = step_then(params, data, at, lambda k, w, u: w * masks[k], lambda k, w, g, u: g * masks[k], begin)
    return {k: w * masks[k] if k in masks else w for k, w in end.items()}
