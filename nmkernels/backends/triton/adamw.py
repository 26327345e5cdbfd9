"""MaskedAdamW: two kernels for each param, for its scalars and for one pass over its elements; torch sums the statistics.

The host reads nothing back from the device. All of it can be captured in a CUDA graph if the step counts are on the device
(``capturable=True``).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference.adamw import AdamWArgs
from ..adamw import STATS, advance, to_device, with_plain_masks
from ..shared import dense
from .groups import kept, narrow, widen
from .launch import cdiv, launch, next_power_of_2
from .mvue import words_of, words_of_four

ELEMENTS = 1024
"""Elements of a tile: two 16-byte reads of each tensor a thread with 4 warps, and few enough registers for 8 blocks on an SM."""

SCALARS = 13


@triton.jit
def power(base, exponent):
    result = tl.full([], 1.0, tl.float64)
    while exponent > 0:
        result = tl.where((exponent & 1) == 1, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


@triton.jit
def number(hyper, i: tl.constexpr, word):
    """Element i of hyper; if that is on the host, the float64 whose bits are ``word``."""
    if hyper is None:
        return word.to(tl.int64).to(tl.float64, bitcast=True)
    else:
        return tl.load(hyper + i)


@triton.jit(do_not_specialize=list(range(4, 14)))
def adamw_scalars_kernel(
    step, scalars, found, hyper, row: tl.int64, t: tl.int64,
    h0: tl.int64, h1: tl.int64, h2: tl.int64, h3: tl.int64, h4: tl.int64, h5: tl.int64, h6: tl.int64, h7: tl.int64,
    FROZEN: tl.constexpr,
):  # fmt: skip
    """Advance the step of a param and write its fp32 numbers, each computed in float64 and rounded once; the last is the step count."""
    if found is not None:  # noqa: SIM102 - decided while compiling; the other is a branch
        if tl.load(found) != 0.0:
            return
    now = t.to(tl.int64)
    if step is not None:
        counted = tl.load(step) + 1.0
        tl.store(step, counted)
        now = counted.to(tl.int64)
    lr, beta1, beta2 = number(hyper, 0, h0), number(hyper, 1, h1), number(hyper, 2, h2)
    at = now
    if FROZEN:
        at = number(hyper, 6, h6).to(tl.int64)
    bc2 = 1.0 - power(beta2, at)
    if FROZEN:
        bc2 = tl.where(at == 0, 1.0, bc2)
    s = scalars + row * 13
    tl.store(s, beta1.to(tl.float32))
    tl.store(s + 1, (1.0 - beta1).to(tl.float32))
    tl.store(s + 2, beta2.to(tl.float32))
    tl.store(s + 3, (1.0 - beta2).to(tl.float32))
    tl.store(s + 4, (1.0 / (1.0 - power(beta1, now))).to(tl.float32))
    tl.store(s + 5, bc2.to(tl.float32))
    tl.store(s + 6, tl.sqrt(bc2).to(tl.float32))
    tl.store(s + 7, number(hyper, 3, h3).to(tl.float32))
    tl.store(s + 8, (1.0 - lr * number(hyper, 4, h4)).to(tl.float32))
    tl.store(s + 9, lr.to(tl.float32))
    tl.store(s + 10, number(hyper, 5, h5).to(tl.float32))
    tl.store(s + 11, number(hyper, 7, h7).to(tl.float32))
    tl.store(s + 12, now.to(tl.float32))


@triton.jit
def mask_of(x, N: tl.constexpr, M: tl.constexpr, PADDED: tl.constexpr):
    """The N:M mask of a line of groups, in its own shape."""
    return tl.reshape(kept(tl.reshape(x, [x.shape[0] // PADDED, PADDED]), N, M), [x.shape[0]])


@triton.jit
def held_mask(bits, at, cols, valid, WHOLE: tl.constexpr):
    """The bits of elements ``at`` of rows of ``cols``, which begin with a byte; WHOLE: they also end with one."""
    if WHOLE:
        byte, bit = at >> 3, at & 7
    else:
        col = at % cols
        byte, bit = at // cols * ((cols + 7) // 8) + (col >> 3), col & 7
    return (tl.load(bits + byte, mask=valid, other=0).to(tl.int32) >> bit.to(tl.int32) & 1) != 0


@triton.jit
def words_at(seed, offset, start, at, TILE: tl.constexpr, PADDED: tl.constexpr, M: tl.constexpr):
    """One uint32 word for each element ``at``: word j & 3 of counter j >> 2. Where M is not padded they are TILE from ``start`` on."""
    if PADDED == M and TILE % 4 == 0:
        return words_of_four(seed, offset, (start >> 2) + tl.arange(0, TILE // 4))
    else:
        return words_of(seed, offset, at)


@triton.jit
def rounded_by(x, r):
    """x rounded to a number whose lower half is zero, away from zero by 16 random bits r; NaN stays."""
    b = x.to(tl.uint32, bitcast=True)
    up = ((b.to(tl.uint64) + r.to(tl.uint64)).to(tl.uint32) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(x != x, x, up)


@triton.jit
def total(x, there):
    return tl.sum(tl.where(there, x, 0.0).to(tl.float64), 0)


@triton.jit
def amount(there):
    return tl.sum(there.to(tl.int32), 0).to(tl.float64)


@triton.jit
def update(m, v, ibc1, bc2, sbc2, eps, EPS_INSIDE: tl.constexpr):
    """u = (m / (1 - β1^t)) / D."""
    if EPS_INSIDE:
        denominator = tl.sqrt_rn(tl.div_rn(v, bc2) + eps)
    else:
        denominator = tl.div_rn(tl.sqrt_rn(v), sbc2) + eps
    return tl.div_rn(m * ibc1, denominator)


@triton.jit
def clamped(u, bound):
    """min(max(u, -bound), bound), NaN stays; u where the bound is 0."""
    low = tl.where(u < -bound, -bound, u)
    return tl.where(bound != 0.0, tl.where(low > bound, bound, low), u)


@triton.jit
def gradient(g, scale, MAXIMIZE: tl.constexpr):
    """±g / scale in fp32; a minus flips the sign of zeros too."""
    g = widen(g)
    if scale is not None:
        g = tl.div_rn(g, tl.load(scale))
    if MAXIMIZE:
        g = (g.to(tl.int32, bitcast=True) ^ -0x80000000).to(tl.float32, bitcast=True)
    return g


@triton.jit(do_not_specialize=list(range(8, 14)))
def adamw_kernel(
    p, m, v, top, g, bits, scalars, partials, row: tl.int64, first: tl.int64, programs: tl.int64, size: tl.int64, cols: tl.int64,
    seed: tl.int64, scale, found,
    N: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr,
    FROZEN: tl.constexpr, EPS_INSIDE: tl.constexpr, MAXIMIZE: tl.constexpr, GEOMETRIC: tl.constexpr, HELD: tl.constexpr,
    FIXED: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """One tile of a param: reads, updates and writes it, and writes its statistics to ``partials[statistic, first + program]``.

    A tile is TILE / PADDED groups of M elements; EVEN and WHOLE: ``size`` and ``cols`` are multiples of 8.
    """
    if found is not None:  # noqa: SIM102 - decided while compiling; the other is a branch
        if tl.load(found) != 0.0:
            return
    program = tl.program_id(0).to(tl.int64)
    start = program * (TILE // PADDED * M)
    left = tl.minimum(size - start, TILE).to(tl.int32)
    if EVEN:
        left = tl.multiple_of(left, 8)
    line = tl.arange(0, TILE)
    if PADDED == M:
        valid = line < left
    else:
        index = line % PADDED
        line = line // PADDED * M + index
        valid = (index < M) & (line < left)
    at = start + line
    old_p = tl.load(p + at, mask=valid, other=0.0)
    g = tl.load(g + at, mask=valid, other=0.0)
    m_at, v_at = m + at, v + at
    state: tl.constexpr = m.dtype.element_ty
    m = tl.load(m_at, mask=valid, other=0.0)
    if FROZEN and top is not None:
        second = tl.load(top + at, mask=valid, other=0.0)
    else:
        second = tl.load(v_at, mask=valid, other=0.0)
    s = scalars + row * 13
    b1, omb1, b2, omb2, ibc1, bc2 = tl.load(s), tl.load(s + 1), tl.load(s + 2), tl.load(s + 3), tl.load(s + 4), tl.load(s + 5)
    sbc2, eps, wdf, lr, decay, bound = tl.load(s + 6), tl.load(s + 7), tl.load(s + 8), tl.load(s + 9), tl.load(s + 10), tl.load(s + 11)
    share = partials + first + program
    old = widen(old_p)
    g = gradient(g, scale, MAXIMIZE)
    if HELD:
        before = held_mask(bits, at, cols, valid, WHOLE)
        if FIXED:
            g = tl.where(before, g, 0.0)
    elif N > 0:
        before = mask_of(old_p, N, M, PADDED)
    if HELD or N > 0:
        tl.store(share + 5 * programs, total(tl.abs(old), valid & ~before))
        tl.store(share + 6 * programs, total(tl.abs(g), valid & ~before))
        if not FIXED:
            g = tl.where(before, g, tl.where(decay == 0.0, g, g + decay * old))
    m = b1 * widen(m) + omb1 * g
    second = widen(second)
    if STOCHASTIC:
        words = words_at(seed.to(tl.int64), tl.load(s + 12).to(tl.int64) + (row.to(tl.int64) << 32), start, at, TILE, PADDED, M)
        tl.store(m_at, narrow(rounded_by(m, words & 0xFFFF), state), mask=valid)
    else:
        tl.store(m_at, narrow(m, state), mask=valid)
    if not FROZEN:
        moved = b2 * second + omb2 * (g * g)
        if STOCHASTIC:
            tl.store(v_at, narrow(rounded_by(moved, words >> 16), state), mask=valid)
        else:
            tl.store(v_at, narrow(moved, state), mask=valid)
        step = tl.abs(moved - second)
        tl.store(share + programs, total(step, valid))
        if GEOMETRIC:
            wide = step.to(tl.float64)
            wide = tl.log(tl.where(wide < 1.401298464324817e-45, 1.401298464324817e-45, wide))
            tl.store(share + 2 * programs, total(wide, valid))
            tl.store(share + 3 * programs, amount((moved == second) & valid))
        second = moved
        if top is not None:
            highest = widen(tl.load(top + at, mask=valid, other=0.0))
            second = tl.where((highest > moved) | (highest != highest), highest, moved)
            tl.store(top + at, narrow(second, state), mask=valid)
    u = update(m, second, ibc1, bc2, sbc2, eps, EPS_INSIDE)
    new = old * wdf - lr * clamped(u, bound)
    if FIXED:
        new = tl.where(before, new, 0.0)
    new = narrow(new, p.dtype.element_ty)
    tl.store(p + at, new, mask=valid)
    used = valid
    if HELD:
        used = valid & before
    elif N > 0:
        after = mask_of(new, N, M, PADDED)
        used = valid & after
        tl.store(share + 4 * programs, amount(valid & (before ^ after)))
    tl.store(share + 7 * programs, amount(used & (widen(new) != 0.0)))
    # the bits of magnitudes are in their order, with NaN above all
    largest = tl.max(tl.where(valid, u.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0), 0)
    tl.store(share + 8 * programs, largest.to(tl.float32, bitcast=True).to(tl.float64))


def masked_adamw_(*args: Any, out: Tensor | None = None) -> Tensor:
    """``nm_masked_adamw_``; tensors that are not contiguous are copied there and back."""
    a = with_plain_masks(AdamWArgs(*args))
    d = to_device(a, out)
    if d.skip:
        return d.stats
    scalars = torch.empty(len(a.steps), SCALARS, dtype=torch.float32, device=d.device)
    count, several = advance(a.steps, d.host_steps)
    # hyper on the host is passed as integers: an argument in floating point would be rounded to float32
    words = a.hyper.contiguous().view(torch.int64).tolist()[:8] if d.hyper is None else [0] * 8
    on_host = set(d.host_steps)
    for i, step in enumerate(a.steps):
        numbers = (None if i in on_host else step, scalars, d.found_inf, d.hyper, i, several[i] if several else count, *words)
        launch(adamw_scalars_kernel, 1, numbers, warps=1, FROZEN=a.frozen)
    padded = next_power_of_2(a.m)
    groups = max(1, ELEMENTS // padded)
    tiles = [cdiv(p.numel(), groups * (a.m or 1)) for p in a.params]
    partials = torch.zeros(STATS, max(1, sum(tiles)), dtype=torch.float64, device=d.device)  # not all statistics are computed
    flags = {"FROZEN": a.frozen, "EPS_INSIDE": a.eps_inside, "MAXIMIZE": a.maximize, "GEOMETRIC": a.geometric}
    flags |= {"HELD": bool(a.masks), "FIXED": a.fixed, "STOCHASTIC": a.stochastic}
    first = 0
    for i, p in enumerate(a.params):
        originals = [xs[i] if xs else None for xs in (a.params, a.exp_avgs, a.exp_avg_sqs, a.max_exp_avg_sqs, a.grads)]
        tensors, cols = _straight(originals, bool(a.m or a.masks or a.stochastic)), p.shape[-1] if a.masks else 8
        even = {"EVEN": p.numel() % 8 == 0, "WHOLE": cols % 8 == 0, "N": a.n, "M": a.m or 1, "TILE": groups * padded, "PADDED": padded}
        sizes = i, first, partials.shape[1], p.numel(), cols, a.seed
        bits = a.masks[i] if a.masks else None
        launch(adamw_kernel, tiles[i], (*tensors, bits, scalars, partials, *sizes, d.grad_scale, d.found_inf), **even, **flags)
        for target, copy in zip(originals[:-1], tensors[:-1], strict=True):
            if target is not None and copy is not None and target is not copy:
                target.copy_(copy)
        first += tiles[i]
    d.stats.copy_(partials.sum(1))
    d.stats[8] = partials[8].amax()
    d.stats[0].fill_(1.0)  # an assignment would copy the number from the host, which no graph can capture
    if d.found_inf is not None:
        d.stats.copy_(torch.where(d.found_inf.reshape(()) != 0, 0.0, d.stats))
    return d.stats


def _straight(originals: list[Tensor | None], ordered: bool) -> list[Tensor | None]:
    """The tensors of a param as the kernel walks them, element by element: themselves, or contiguous copies.

    ``ordered``: an element's place in its row matters, for groups, masks and random words.
    """
    present = [x for x in originals if x is not None]
    if not any(x.is_neg() for x in present):
        if all(x.is_contiguous() for x in present):
            return originals
        if not ordered and dense(present[0]) and all(x.stride() == present[0].stride() for x in present):
            return originals
    return [None if x is None else x.resolve_neg().contiguous() for x in originals]
