"""AdamW whose second moment comes from other gradients than its first: a test of STEP's premise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CLAMP = 2.0
"""The default of STEP."""


class AdamWithDenseV(torch.optim.Optimizer):
    """m = β₁ m + (1 − β₁) g, v = β₂ v + (1 − β₂) h², W ← (1 − lr · wd) W − lr · u, u = m̂ / (√v̂ + ε), with h from ``dense``.

    With h the gradient of the dense weights this is the second moment that STEP assumes to be better, at every step and without a dense
    phase. Where a parameter has no h, h = g. As in STEP, |u| is at most 2 where there is one: a unit may be dead in the dense model
    and alive in the sparse one, and then v is 0 and m is not.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float, eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})
        self.dense: dict[Tensor, Tensor | None] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                h = self.dense.get(p)
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].lerp_((p.grad if h is None else h).square(), 1 - beta2)
                m, v = state["exp_avg"] / (1 - beta1 ** state["step"]), state["exp_avg_sq"] / (1 - beta2 ** state["step"])
                update = m.div_(v.sqrt_().add_(group["eps"]))
                if h is not None:
                    update.clamp_(-CLAMP, CLAMP)
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
