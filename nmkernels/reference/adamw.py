"""One AdamW step that also decays pruned weights, renews their masks and writes the weight for the next forward pass.

The equations are those of ``nm.ops.masked_adamw_``, every operation rounded once in the compute dtype (float32; float64 for float64), in
this order; M is the mask of the weights before the step, M' after it, t the step counted from 1, β^t by squaring in float64::

    D = (√v / √(1-β2^t)) + ε   or, eps_inside,   D = √((v / (1-β2^t)) + ε)  (amsgrad: the running maximum of v)
    u = (m (1/(1-β1^t))) / D;  u = min(max(u, -clamp), clamp)             (clamp = 0: skipped)
    p = (p (1 - lr wd)) - (lr u);  out = p where M' else +0.0;  packs = pack(p, M')

Of the statistics, over all tensors of a call, a logarithm is that of max(|v_t - v_{t-1}|, 2^-149); those of v are 0 when frozen, the
logarithms and the unchanged elements unless geometric, the flips and sums over pruned elements without masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..pattern import DtypeError, ShapeError
from .common import check, check_float, chunked_sum, compute_dtype
from .mask import mask
from .pack import check_packs, write_packs
from .transposable import transposable_mask

OP = "masked_adamw_"
Masks = Callable[[Tensor], Tensor]
SMALLEST = 2.0**-149
"""The smallest float32 denormal: below it a change of v counts as this much in the sum of logarithms."""


@dataclass
class _Scalars:
    """The numbers of one parameter's step, each computed in float64 and rounded to the compute dtype."""

    b1: Tensor
    omb1: Tensor
    b2: Tensor
    omb2: Tensor
    ibc1: Tensor
    bc2: Tensor
    sbc2: Tensor
    eps: Tensor
    wdf: Tensor
    lr: Tensor
    decay: Tensor
    clamp: Tensor


def power(base: float, exponent: int) -> float:
    """base**exponent in float64 by squaring, lowest bit of the exponent first; the same bits on every machine."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def _scalars(hyper: list[float], t: int, frozen: bool, like: Tensor) -> _Scalars:
    lr, beta1, beta2, eps, weight_decay, decay, v_step, clamp, _ = hyper
    v_t = int(v_step) if frozen else t
    bc2 = 1.0 if frozen and v_t == 0 else 1.0 - power(beta2, v_t)
    ibc1 = 1.0 / (1.0 - power(beta1, t))
    numbers = (beta1, 1.0 - beta1, beta2, 1.0 - beta2, ibc1, bc2, math.sqrt(bc2), eps, 1.0 - lr * weight_decay, lr, decay, clamp)
    return _Scalars(*(torch.tensor(x, dtype=compute_dtype(like.dtype), device=like.device) for x in numbers))


def _sqrt(x: Tensor) -> Tensor:
    """√x, in float32 correctly rounded: torch's own float32 root is not, on the CPU (nor its float64 one, by one unit)."""
    return x.double().sqrt().to(x.dtype)


@dataclass
class _One:
    """One parameter and everything that belongs to it."""

    p: Tensor
    grad: Tensor
    avg: Tensor
    sq: Tensor
    top: Tensor | None
    step: Tensor
    out: Tensor | None


@torch.no_grad()
def masked_adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    outs: Sequence[Tensor],
    hyper: Tensor,
    n: int,
    m: int,
    frozen: bool = False,
    eps_inside: bool = False,
    maximize: bool = False,
    geometric: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    transposable: bool = False,
    packs: Sequence[Tensor] | None = None,
    layout: str = "canonical",
) -> Tensor:
    """Apply one AdamW step in place, with N:M masks of the weights before and after it; the module's page has the equations.

    Arguments and errors as ``nm.ops.masked_adamw_``, but: n = m = 0 means no masks, empty lists stand for what is not given, and ``packs``
    are None or four buffers per parameter, see ``pack``. Returns the statistics, float64 [9].
    """
    lists = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    lists |= {"max_exp_avg_sqs": max_exp_avg_sqs, "steps": steps, "outs": outs}
    _check(params, lists, hyper, n, m)
    check_packs(OP, params, n, m, transposable, packs, layout)
    stats = torch.zeros(9, dtype=torch.float64, device=params[0].device if params else hyper.device)
    if found_inf is not None and bool(found_inf != 0):
        return stats
    stats[0] = 1.0

    def keep(p: Tensor) -> Tensor:
        """The mask of a weight."""
        if not n:
            return torch.ones_like(p, dtype=torch.bool)
        return (transposable_mask if transposable else mask)(p, n, m)

    absent: list[Any] = [None] * len(params)
    rows = zip(params, *(tensors or absent for tensors in lists.values()), strict=True)
    for i, row in enumerate(rows):
        one = _One(*row)
        one.step.add_(1)
        s = _scalars(hyper.tolist(), int(one.step.item()), frozen, one.p)
        after = _step(one, s, stats, keep, frozen, eps_inside, -1 if maximize else 1, geometric, grad_scale)
        if packs:
            write_packs(one.p, after, n, m, packs[4 * i : 4 * i + 4], layout)
    return stats


def _step(
    one: _One,
    s: _Scalars,
    stats: Tensor,
    keep: Masks,
    frozen: bool,
    eps_inside: bool,
    sign: int,
    geometric: bool,
    scale: Tensor | None,
) -> Tensor:
    """Everything that happens to one parameter; returns its new mask."""
    p, old = one.p, one.p.to(s.b1.dtype)
    g = one.grad.to(s.b1.dtype)
    if scale is not None:
        g = g / scale.to(s.b1.dtype)
    if sign < 0:
        g = -g
    before = keep(p)
    stats[5] += chunked_sum(old.abs().masked_fill(before, 0.0))
    stats[6] += chunked_sum(g.abs().masked_fill(before, 0.0))
    if s.decay != 0:
        g = torch.where(before, g, g + s.decay * old)
    _moments(one, g, s, stats, frozen, geometric)
    v = one.sq if one.top is None else one.top
    denominator = _sqrt(v / s.bc2 + s.eps) if eps_inside else _sqrt(v) / s.sbc2 + s.eps
    u = one.avg * s.ibc1 / denominator
    if u.numel():
        stats[8] = torch.maximum(stats[8], u.abs().max().double())
    if s.clamp != 0:
        u = u.clamp(-s.clamp, s.clamp)
    p.copy_(old * s.wdf - s.lr * u)
    after = keep(p)
    stats[4] += (before ^ after).sum()
    stats[7] += ((p != 0) & after).sum()
    if one.out is not None:
        one.out.copy_(p.masked_fill(~after, 0.0))
    return after


def _moments(one: _One, g: Tensor, s: _Scalars, stats: Tensor, frozen: bool, geometric: bool) -> None:
    """Advance m, and unless frozen v and its running maximum."""
    one.avg.copy_(s.b1 * one.avg + s.omb1 * g)
    if frozen:
        return
    v = s.b2 * one.sq + s.omb2 * (g * g)
    change = (v - one.sq).abs()
    stats[1] += chunked_sum(change)
    if geometric:
        stats[2] += chunked_sum(change.double().clamp_min(SMALLEST).log())
        stats[3] += (v == one.sq).sum()
    one.sq.copy_(v)
    if one.top is not None:
        one.top.copy_(torch.maximum(one.top, v))


def _check(params: Sequence[Tensor], lists: dict[str, Sequence[Tensor]], hyper: Tensor, n: int, m: int) -> None:
    for p in params:
        check_float(OP, "a parameter", p)
        if n or m:
            check(OP, p, n, m)
    for name, tensors in lists.items():
        optional = name in ("max_exp_avg_sqs", "outs") and not tensors
        if len(tensors) != len(params) and not optional:
            raise ShapeError(f"{OP}: {len(params)} params but {len(tensors)} {name}; give one for each.")
        for p, x in zip(params, tensors, strict=False):
            check_float(OP, f"a tensor of {name}", x)
            if name != "steps" and x.shape != p.shape:
                raise ShapeError(f"{OP}: {name} has shape {tuple(x.shape)} for a parameter of {tuple(p.shape)}; they must be equal.")
            if "exp_avg" in name and x.dtype != compute_dtype(p.dtype):
                raise DtypeError(f"{OP}: {name} is {x.dtype} for a parameter of {p.dtype}; it must be {compute_dtype(p.dtype)}.")
    if hyper.shape != (9,):
        raise ShapeError(f"{OP}: hyper has shape {tuple(hyper.shape)}, not (9,): lr, β1, β2, eps, weight_decay, decay, v_step, clamp, 0.")
