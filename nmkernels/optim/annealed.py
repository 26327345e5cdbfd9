"""AnnealedAdamW: AdamW with a decay of pruned weights that is added after the momentum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops import STATS
from .adamw import MaskedAdamW, _Bucket, merge_stats


class AnnealedAdamW(MaskedAdamW):
    """MaskedAdamW that decays pruned weights past the momentum, as the Adaptive Sparse Trainer does (Huang et al., AAAI 2025).

    Where a recipe's rule is ``late``, with r the gradient of the transform's penalty, λ_t (1 − M) ⊙ w of the weight before the step::

        m = β₁m + (1 − β₁)g,   u = m/(1 − β₁ᵗ) + r
        v = β₂v + (1 − β₂)s²,  s = u (late="total") or g + r (late="gradient")
        w ← w (1 − lr·wd) − lr · u / (√v/√(1 − β₂ᵗ) + ε)

    The momentum is bias-corrected before r is added, so that r needs no correction; v is corrected as ever. All other parameters, and
    all of them under any other rule, are updated as by MaskedAdamW. The late update is in plain torch operations, about 20 passes over
    memory for each masked parameter.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, foreach, maximize, capturable, differentiable, fused: as for ``MaskedAdamW``.

    The state is AdamW's, and loads into it and from it. With a ``GradScaler`` a skipped step changes nothing; on a GPU the host then waits
    for the device once per parameter, unless ``capturable`` keeps the step counts there.

    Example:
        >>> w = torch.nn.Parameter(torch.ones(2, 4))
        >>> opt = AnnealedAdamW([w], lr=0.1, weight_decay=0.0)
        >>> w.sum().backward()
        >>> opt.step()
        >>> round(w[0, 0].item(), 4)
        0.9
    """

    def _run(self, group: dict[str, Any], b: _Bucket) -> None:
        if not b.maskable or not self.rule.late:
            super()._run(group, b)
            return
        largest = torch.stack([self._late(group, b, i) for i in range(len(b.params))]).max()
        stats = torch.zeros(len(STATS), dtype=torch.float64, device=largest.device)
        stats[STATS.index("max_update")] = largest
        stats[STATS.index("applied")] = self._applied(largest.device).double()
        self.stats = stats if self.stats is None else merge_stats(self.stats, stats)
        self.stats_numel += sum(p.numel() for p in b.params)

    def _applied(self, device: torch.device) -> Tensor:
        found_inf = getattr(self, "found_inf", None)
        return torch.ones((), dtype=torch.bool, device=device) if found_inf is None else (found_inf == 0).reshape(()).to(device)

    def _late(self, group: dict[str, Any], b: _Bucket, i: int) -> Tensor:
        """Update the i-th parameter of the bucket; the largest |u/D| of it, 0 if the step is skipped."""
        w, m, v, step = b.params[i], b.moments["exp_avg"][i], b.moments["exp_avg_sq"][i], b.steps[i]
        applied, (beta1, beta2), lr = self._applied(w.device), group["betas"], group["lr"]
        g, penalty = self._unscaled(group, b.grads[i].to(m.dtype)), b.penalties[i]()
        r = torch.zeros_like(m) if penalty is None else penalty.to(m.dtype)
        # a count on the CPU is read there for nothing; one on the device stays there, for a captured step
        t = float(step) + 1.0 if step.device.type == "cpu" else step.double() + 1.0
        new_m = m * beta1 + g * (1 - beta1)
        u = new_m / (1 - beta1**t) + r
        s = u if self.rule.late == "total" else g + r
        new_v = v * beta2 + s * s * (1 - beta2)
        moved = [(m, new_m), (v, new_v)]
        if group["amsgrad"]:
            new_v = torch.maximum(b.moments["max_exp_avg_sq"][i], new_v)
            moved.append((b.moments["max_exp_avg_sq"][i], new_v))
        u = u / (new_v.sqrt() / (1 - beta2**t) ** 0.5 + group["eps"])
        moved.append((w, w.to(m.dtype) * (1 - lr * group["weight_decay"]) - lr * u))
        for old, new in moved:
            old.copy_(torch.where(applied, new.to(old.dtype), old))
        step.add_(applied.to(step.device, step.dtype))
        return torch.where(applied, u.abs().max(), 0.0).double()

    def _unscaled(self, group: dict[str, Any], g: Tensor) -> Tensor:
        scale = getattr(self, "grad_scale", None)
        g = g if scale is None else g / scale.to(g.device)
        return -g if group["maximize"] else g
