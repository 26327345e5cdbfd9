"""One AdamW step that also decays pruned weights, updates their masks and gathers statistics.

The equations are those of ``nm.ops.masked_adamw_``. Each operation is rounded once in the compute dtype (float32; float64 for float64), in
the order of the code; β^t is computed in float64 by squaring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .common import chunked_sum, compute_dtype
from .mask import mask

SMALLEST = 2.0**-149
"""The smallest float32 denormal; the sum of logarithms counts smaller changes of v as this much."""


class AdamWArgs(NamedTuple):
    """The arguments of ``nm_masked_adamw_``, in the order of its schema; every backend begins with ``a = AdamWArgs(*args)``.

    They are those of ``nm.ops.masked_adamw_``, but n = m = 0 means no pattern, and an empty ``max_exp_avg_sqs`` means no amsgrad.
    """

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    max_exp_avg_sqs: Sequence[Tensor]
    steps: Sequence[Tensor]
    hyper: Tensor
    n: int
    m: int
    frozen: bool = False
    eps_inside: bool = False
    maximize: bool = False
    geometric: bool = False
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    masks: Sequence[Tensor] | None = None
    fixed: bool = False


def bits_of(mask: Tensor) -> Tensor:
    """A bool mask ``(..., cols)`` as uint8 ``(..., ceil(cols / 8))``: bit i % 8 of byte i // 8 is column i, spare bits are 0."""
    size = -(-mask.shape[-1] // 8)
    eights = torch.nn.functional.pad(mask.to(torch.uint8), (0, 8 * size - mask.shape[-1])).unflatten(-1, (size, 8))
    return (eights << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(-1, dtype=torch.uint8).contiguous()


def mask_of(bits: Tensor, cols: int) -> Tensor:
    """The mask ``(..., cols)`` of which ``bits_of`` made ``bits``."""
    eights = bits.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=bits.device) & 1
    return eights.bool().flatten(-2)[..., :cols]


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
def masked_adamw_(*args: Any, **named: Any) -> Tensor:
    """Take one AdamW step in place, with N:M masks of the weights before and after it; returns the statistics, float64 [9].

    The arguments are those of ``AdamWArgs``. The statistics are sums over all tensors of the call: those of v are 0 if it is frozen, the
    logarithms and the unchanged elements unless ``geometric``, the flips and the sums over pruned elements without masks.
    """
    a = AdamWArgs(*args, **named)
    stats = torch.zeros(9, dtype=torch.float64, device=a.params[0].device if a.params else a.hyper.device)
    if a.found_inf is not None and bool(a.found_inf != 0):
        return stats
    stats[0] = 1.0
    tops: Sequence[Tensor | None] = a.max_exp_avg_sqs or [None] * len(a.params)
    held: Sequence[Tensor | None] = [mask_of(bits, p.shape[-1]) for bits, p in zip(a.masks or (), a.params, strict=False)]
    held = held or [None] * len(a.params)
    for p, grad, avg, sq, top, step, keep in zip(a.params, a.grads, a.exp_avgs, a.exp_avg_sqs, tops, a.steps, held, strict=True):
        step.add_(1)
        s = _scalars(a.hyper.tolist(), int(step.item()), a.frozen, p)
        g = grad.to(s.b1.dtype)
        if a.grad_scale is not None:
            g = g / a.grad_scale.to(s.b1.dtype)
        _step(a, s, p, -g if a.maximize else g, avg, sq, top, keep, stats)
    return stats


def _mask(p: Tensor, a: AdamWArgs, held: Tensor | None) -> Tensor:
    if held is not None:
        return held
    return mask(p, a.n, a.m) if a.n else torch.ones_like(p, dtype=torch.bool)


def _step(
    a: AdamWArgs, s: SimpleNamespace, p: Tensor, g: Tensor, avg: Tensor, sq: Tensor, top: Tensor | None, held: Tensor | None, stats: Tensor
) -> None:
    """Step one parameter by its gradient in the compute dtype, and add to the statistics."""
    before, old = _mask(p, a, held), p.to(g.dtype)
    if a.fixed:
        g = torch.where(before, g, 0.0)
    stats[5] += chunked_sum(old.abs().masked_fill(before, 0.0))
    stats[6] += chunked_sum(g.abs().masked_fill(before, 0.0))
    if s.decay != 0 and not a.fixed:
        g = torch.where(before, g, g + s.decay * old)
    avg.copy_(s.b1 * avg + s.omb1 * g)
    if not a.frozen:
        _second_moment(g, sq, top, s, stats, a.geometric)
    v = sq if top is None else top
    denominator = _sqrt(v / s.bc2 + s.eps) if a.eps_inside else _sqrt(v) / s.sbc2 + s.eps
    u = avg * s.ibc1 / denominator
    if u.numel():
        stats[8] = torch.maximum(stats[8], u.abs().max().double())
    if s.clamp != 0:
        u = u.clamp(-s.clamp, s.clamp)
    new = old * s.wdf - s.lr * u
    p.copy_(torch.where(before, new, 0.0) if a.fixed else new)
    after = _mask(p, a, held)
    stats[4] += (before ^ after).sum()
    stats[7] += ((p != 0) & after).sum()


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
