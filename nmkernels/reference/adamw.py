"""One AdamW step that also decays pruned weights, renews their masks and writes the weight for the next forward pass.

The equations are those of ``nm.ops.masked_adamw_``, every operation rounded once in the compute dtype (float32; float64 for float64), in
the order of the code; β^t by squaring in float64.

Of the statistics, over all tensors of a call, a logarithm is that of max(|v_t - v_{t-1}|, 2^-149); those of v are 0 when frozen, the
logarithms and the unchanged elements unless geometric, the flips and sums over pruned elements without masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .common import chunked_sum, compute_dtype
from .mask import mask
from .pack import write_packs
from .transposable import transposable_mask

SMALLEST = 2.0**-149
"""The smallest float32 denormal: below it a change of v counts as this much in the sum of logarithms."""


def power(base: float, exponent: int) -> float:
    """base**exponent in float64 by squaring, lowest bit of the exponent first; the same bits on every machine."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def _scalars(hyper: list[float], t: int, frozen: bool, like: Tensor) -> SimpleNamespace:
    """The numbers of one parameter's step, each computed in float64 and rounded to the compute dtype."""
    lr, beta1, beta2, eps, weight_decay, decay, v_step, clamp, _ = hyper
    v_t = int(v_step) if frozen else t
    bc2 = 1.0 if frozen and v_t == 0 else 1.0 - power(beta2, v_t)
    numbers = {
        "b1": beta1,
        "omb1": 1.0 - beta1,
        "b2": beta2,
        "omb2": 1.0 - beta2,
        "ibc1": 1.0 / (1.0 - power(beta1, t)),
        "bc2": bc2,
        "sbc2": math.sqrt(bc2),
        "eps": eps,
        "wdf": 1.0 - lr * weight_decay,
        "lr": lr,
        "decay": decay,
        "clamp": clamp,
    }
    dtype = compute_dtype(like.dtype)
    return SimpleNamespace(**{name: torch.tensor(x, dtype=dtype, device=like.device) for name, x in numbers.items()})


def _sqrt(x: Tensor) -> Tensor:
    """√x, in float32 correctly rounded: torch's own float32 root is not, on the CPU (nor its float64 one, by one unit)."""
    return x.double().sqrt().to(x.dtype)


@torch.no_grad()
def masked_adamw_(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor], steps: Sequence[Tensor], outs: Sequence[Tensor],
    hyper: Tensor, n: int, m: int, frozen: bool = False, eps_inside: bool = False, maximize: bool = False, geometric: bool = False,
    grad_scale: Tensor | None = None, found_inf: Tensor | None = None,
    transposable: bool = False, packs: Sequence[Tensor] | None = None, layout: str = "canonical",
) -> Tensor:  # fmt: skip
    """Apply one AdamW step in place, with N:M masks of the weights before and after it; the module's page has the equations.

    Arguments as ``nm.ops.masked_adamw_``, but: n = m = 0 means no masks, empty lists stand for what is not given, and ``packs`` are None
    or four buffers per parameter, values and indices of W and of Wᵀ. Returns the statistics, float64 [9].
    """
    stats = torch.zeros(9, dtype=torch.float64, device=params[0].device if params else hyper.device)
    if found_inf is not None and bool(found_inf != 0):
        return stats
    stats[0] = 1.0

    def keep(p: Tensor) -> Tensor:
        if not n:
            return torch.ones_like(p, dtype=torch.bool)
        return (transposable_mask if transposable else mask)(p, n, m)

    absent: list[Any] = [None] * len(params)
    lists = params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs or absent, steps, outs or absent
    for i, (p, grad, avg, sq, top, step, out) in enumerate(zip(*lists, strict=True)):
        step.add_(1)
        s = _scalars(hyper.tolist(), int(step.item()), frozen, p)
        g = grad.to(s.b1.dtype)
        if grad_scale is not None:
            g = g / grad_scale.to(s.b1.dtype)
        g = -g if maximize else g
        after = _step(p, g, avg, sq, top, s, stats, keep, frozen, eps_inside, geometric)
        if out is not None:
            out.copy_(p.masked_fill(~after, 0.0))
        if packs:
            write_packs(p, after, n, m, packs[4 * i : 4 * i + 4], layout)
    return stats


def _step(
    p: Tensor, g: Tensor, avg: Tensor, sq: Tensor, top: Tensor | None, s: SimpleNamespace, stats: Tensor,
    keep: Callable[[Tensor], Tensor], frozen: bool, eps_inside: bool, geometric: bool,
) -> Tensor:  # fmt: skip
    """Step one parameter by its gradient in the compute dtype, add to the statistics, and return its new mask."""
    before, old = keep(p), p.to(g.dtype)
    stats[5] += chunked_sum(old.abs().masked_fill(before, 0.0))
    stats[6] += chunked_sum(g.abs().masked_fill(before, 0.0))
    if s.decay != 0:
        g = torch.where(before, g, g + s.decay * old)
    avg.copy_(s.b1 * avg + s.omb1 * g)
    if not frozen:
        _second_moment(g, sq, top, s, stats, geometric)
    v = sq if top is None else top
    denominator = _sqrt(v / s.bc2 + s.eps) if eps_inside else _sqrt(v) / s.sbc2 + s.eps
    u = avg * s.ibc1 / denominator
    if u.numel():
        stats[8] = torch.maximum(stats[8], u.abs().max().double())
    if s.clamp != 0:
        u = u.clamp(-s.clamp, s.clamp)
    p.copy_(old * s.wdf - s.lr * u)
    after = keep(p)
    stats[4] += (before ^ after).sum()
    stats[7] += ((p != 0) & after).sum()
    return after


def _second_moment(g: Tensor, sq: Tensor, top: Tensor | None, s: SimpleNamespace, stats: Tensor, geometric: bool) -> None:
    v = s.b2 * sq + s.omb2 * (g * g)
    change = (v - sq).abs()
    stats[1] += chunked_sum(change)
    if geometric:
        stats[2] += chunked_sum(change.double().clamp_min(SMALLEST).log())
        stats[3] += (v == sq).sum()
    sq.copy_(v)
    if top is not None:
        top.copy_(torch.maximum(top, v))
