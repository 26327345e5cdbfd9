"""AnnealedAdamW: AdamW with a decay of pruned weights that is added after the momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..ops import STATS
from ..pattern import NMError, OptionError
from ..reference.common import compute_dtype
from .adamw import MaskedAdamW, _Bucket
from .rules import UpdateRule

BLOCK = 1 << 15
"""Weights of a block that a CPU updates together, so that the tensors between two operations stay in its cache."""


@dataclass(frozen=True)
class AnnealedRule(UpdateRule):
    """The rule of an ``AnnealedAdamW``, which adds the penalty's gradient after the momentum.

    Args:
        second_moment: of ``"total"``, m̂ + penalty, or of ``"gradient"``, g + penalty.
    """

    second_moment: str = "total"

    adds_penalty: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.second_moment not in ("total", "gradient"):
            raise NMError(f"AnnealedRule: second_moment={self.second_moment!r} is unknown; choose 'total' or 'gradient'.")
        if self.fixed:
            raise NMError("AnnealedRule: fixed=True is not possible, its update decays what lies outside of the mask; use UpdateRule.")


class AnnealedAdamW(MaskedAdamW):
    """MaskedAdamW that decays pruned weights after the momentum, as the Adaptive Sparse Trainer does (Huang et al., AAAI 2025).

    Where a recipe's rule is an ``AnnealedRule``, with r the gradient of the transform's penalty, λ_t (1 − M) ⊙ w of the weight before the
    step::

        m = β₁m + (1 − β₁)g,   u = m/(1 − β₁ᵗ) + r
        v = β₂v + (1 − β₂)s²,  s = u (second_moment="total") or g + r (second_moment="gradient")
        w ← w (1 − lr·wd) − lr · u / (√v/√(1 − β₂ᵗ) + ε)

    All other parameters, and all parameters under any other rule, are updated as by MaskedAdamW, whose arguments, state and errors it has.
    The annealed update is written in torch operations, about 20 passes over memory. With a ``GradScaler`` on a GPU the host waits for the
    device once per parameter, unless ``capturable`` keeps the step counts there.

    Example:
        >>> w = torch.nn.Parameter(torch.ones(2, 4))
        >>> opt = AnnealedAdamW([w], lr=0.1, weight_decay=0.0)
        >>> w.sum().backward()
        >>> opt.step()
        >>> round(w[0, 0].item(), 4)
        0.9
    """

    def __init__(self, params: Any, lr: float | Tensor = 1e-3, *args: Any, rounding: str = "nearest", **kwargs: Any) -> None:
        if rounding == "stochastic":
            raise OptionError("AnnealedAdamW: its update in torch operations rounds states to nearest; use rounding='nearest'.")
        super().__init__(params, lr, *args, rounding=rounding, **kwargs)

    def _run(self, group: dict[str, Any], b: _Bucket) -> Tensor:
        if not b.maskable or not isinstance(self.rule, AnnealedRule):
            return super()._run(group, b)
        largest = torch.stack([self._annealed(group, b, i, self.rule) for i in range(len(b.params))]).max()
        stats = torch.zeros(len(STATS), dtype=torch.float64, device=largest.device)
        stats[STATS.index("max_update")] = largest
        stats[STATS.index("applied")] = self._applied(largest.device).double()
        return stats

    def _applied(self, device: torch.device) -> Tensor:
        found_inf = getattr(self, "found_inf", None)
        return torch.ones((), dtype=torch.bool, device=device) if found_inf is None else (found_inf == 0).reshape(()).to(device)

    def _annealed(self, group: dict[str, Any], b: _Bucket, i: int, rule: AnnealedRule) -> Tensor:
        """Update the i-th parameter of the bucket; the largest |u/D| of it, 0 if the step is skipped."""
        w, step, target = b.params[i], b.steps[i], b.targets[i]
        penalty = target.penalty() if target is not None else None
        parts = [w, b.grads[i], torch.zeros_like(w) if penalty is None else penalty, b.moments["exp_avg"][i], b.moments["exp_avg_sq"][i]]
        if group["amsgrad"]:
            parts.append(b.moments["max_exp_avg_sq"][i])
        # reading a count on the CPU is free; one on the device stays there, for a captured step
        t = float(step) + 1.0 if step.device.type == "cpu" else step.double() + 1.0
        applied = self._applied(w.device)
        rows = max(1, BLOCK // w.shape[-1]) if w.device.type == "cpu" else w.shape[0]
        blocks = zip(*(part.split(rows) for part in parts), strict=True)
        largest = torch.stack([self._block(group, rule, t, applied, *block) for block in blocks]).max()
        step.add_(applied.to(step.device, step.dtype))
        return torch.where(applied, largest, 0.0).double()

    def _block(self, group: dict[str, Any], rule: AnnealedRule, t: float | Tensor, applied: Tensor, *tensors: Tensor) -> Tensor:
        w, g, r, m, v, *peak = tensors
        (beta1, beta2), lr, scale = group["betas"], group["lr"], getattr(self, "grad_scale", None)
        dtype = compute_dtype(w.dtype)
        old_m, old_v, old_w, *old_peak = (x.to(dtype) for x in (m, v, w, *peak))
        g, r = g.to(dtype), r.to(dtype)
        g = g if scale is None else g / scale.to(g.device)
        g = -g if group["maximize"] else g
        new_m = old_m * beta1 + g * (1 - beta1)
        u = new_m / (1 - beta1**t) + r
        s = u if rule.second_moment == "total" else g + r
        new_v = old_v * beta2 + s * s * (1 - beta2)
        new_peak = [torch.maximum(p, new_v) for p in old_peak]
        u = u / ((*new_peak, new_v)[0].sqrt() / (1 - beta2**t) ** 0.5 + group["eps"])
        new_w = old_w * (1 - lr * group["weight_decay"]) - lr * u
        for old, new in zip((m, v, w, *peak), (new_m, new_v, new_w, *new_peak), strict=True):
            old.copy_(torch.where(applied, new.to(old.dtype), old))
        return u.abs().max()
