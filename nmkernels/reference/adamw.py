"""One AdamW step that also decays pruned weights, updates their masks and gathers statistics.

The equations are those of ``nm.ops.masked_adamw_``. Each operation is rounded once in the compute dtype (float32; float64 for float64), in
the order of the code; β^t is computed in float64 by squaring.

States in bfloat16 are widened, stepped in float32 and rounded once, after all else has read them: the update and the statistics are those
of the new states before that. They are rounded to nearest even or, m and v only, stochastically: of 16 random bits r and the bits b of the
float32, the upper half of b + r. The word of element j (row-major in its param) in step t of the k-th param is word j of the random stream
of ``nm.ops.mvue`` with that seed and offset = t + 2³² k; r is its lower half for m and its upper half for v.
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
from .mvue import words

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
    stochastic: bool = False
    seed: int = 0


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
    for k, (p, grad, avg, sq, step) in enumerate(zip(a.params, a.grads, a.exp_avgs, a.exp_avg_sqs, a.steps, strict=True)):
        step.add_(1)
        t = int(step.item())
        s = _scalars(a.hyper.tolist(), t, a.frozen, p)
        low = high = None
        if a.stochastic:
            random = words(torch.tensor([a.seed, t | k << 32], device=p.device), p.numel()).view(p.shape)
            low, high = random & 0xFFFF, random >> 16
        held = mask_of(a.masks[k], p.shape[-1]) if a.masks else None
        before, old, g = _mask(p, a, held), p.to(s.b1.dtype), grad.to(s.b1.dtype)
        if a.grad_scale is not None:
            g = g / a.grad_scale.to(g.dtype)
        g = -g if a.maximize else g
        if a.fixed:
            g = torch.where(before, g, 0.0)
        stats[5] += chunked_sum(old.abs().masked_fill(before, 0.0))
        stats[6] += chunked_sum(g.abs().masked_fill(before, 0.0))
        if s.decay != 0 and not a.fixed:
            g = torch.where(before, g, g + s.decay * old)
        first = s.b1 * avg.to(g.dtype) + s.omb1 * g
        avg.copy_(_rounded(first, low))
        top = a.max_exp_avg_sqs[k] if a.max_exp_avg_sqs else None
        v = (sq if top is None else top).to(g.dtype)
        if not a.frozen:
            last = sq.to(g.dtype)
            second = s.b2 * last + s.omb2 * (g * g)
            change = (second - last).abs()
            stats[1] += chunked_sum(change)
            if a.geometric:
                stats[2] += chunked_sum(change.double().clamp_min(SMALLEST).log())
                stats[3] += (second == last).sum()
            sq.copy_(_rounded(second, high))
            v = second
            if top is not None:
                v = torch.maximum(top.to(g.dtype), second)
                top.copy_(v)
        denominator = _sqrt(v / s.bc2 + s.eps) if a.eps_inside else _sqrt(v) / s.sbc2 + s.eps
        u = first * s.ibc1 / denominator
        if u.numel():
            stats[8] = torch.maximum(stats[8], u.abs().max().double())
        if s.clamp != 0:
            u = u.clamp(-s.clamp, s.clamp)
        new = old * s.wdf - s.lr * u
        p.copy_(torch.where(before, new, 0.0) if a.fixed else new)
        after = _mask(p, a, held)
        stats[4] += (before ^ after).sum()
        stats[7] += ((p != 0) & after).sum()
    return stats


def _mask(p: Tensor, a: AdamWArgs, held: Tensor | None) -> Tensor:
    if held is not None:
        return held
    return mask(p, a.n, a.m) if a.n else torch.ones_like(p, dtype=torch.bool)


def _rounded(x: Tensor, drawn: Tensor | None) -> Tensor:
    """``x``, or ``x`` rounded to 16 bits by the random bits that are drawn."""
    if drawn is None:
        return x
    bits = (x.view(torch.int32).long() + drawn) & ~0xFFFF
    return torch.where(x.isnan(), x, bits.to(torch.int32).view(torch.float32))
