"""Pruning one matrix: its error on its inputs, the damping that a method needs, and Wanda's mask where its result is worse."""

from __future__ import annotations

import math
import sys
import time

import torch
from torch import Tensor

from .. import ops
from ..pattern import Pattern
from ..train.report import Pruned
from .base import OneShot
from .hessians import wide

FEW, MANY = 0.1, 0.01
"""The damping below and from ``ENOUGH`` tokens per input on."""
ENOUGH = 4
ATTEMPTS = 5
"""Factorisations that are tried, each with ten times the damping."""
ROWS = 1024
"""Rows that are worked on together, which bounds temporary memory; rows are independent of each other."""
GAIN = 1e-3
"""The share of the error by which a step of ``refit`` has to lower it for another one to follow."""
NOTHING = 1e-16
"""The square of an input that was always zero, relative to the smallest of the others."""
TINY = 1e-30
"""Smaller squares end the search of a row."""


def solve(method: OneShot, weight: Tensor, h: Tensor, tokens: int, pattern: Pattern) -> tuple[ops.Compressed, Pruned]:
    """Prune one matrix ``(out, in)`` with the Hessian H of its inputs; the new one is compressed, in the weight's dtype.

    A result whose error is larger than that of Wanda's mask is replaced by that mask, if the method is ``guarded``.
    """
    begin, damping = time.monotonic(), 0.0
    w = weight.to(wide(weight.dtype), copy=True)
    h = h.to(w.device)
    error = wanda = None
    size = float(squared_error(w, None, h))
    if tokens < pattern.m or not math.isfinite(size):
        note = "magnitude: " + ("its inputs overflow" if tokens >= pattern.m else f"{tokens or 'no'} tokens reached it")
        mask = method.mask(w, pattern)
        z = w * mask
    else:
        fallback = method.mask(w * scales(h), pattern)
        wanda = float(squared_error(w, (w * fallback).to(weight.dtype).to(w.dtype), h)) / (size or 1.0)
        z, mask, damping, note = _attempt(method, w, h, tokens, pattern, fallback)
        z = z.to(weight.dtype).to(w.dtype)
        error = float(squared_error(w, z, h)) / (size or 1.0)
        if method.guarded and not error <= wanda:
            z, mask, error = w * fallback, fallback, wanda
            note = note or "Wanda's mask, which has the smaller error"
    packed = ops.compress(z.to(weight.dtype), pattern, mask)
    return packed, Pruned(error, wanda, tokens, damping, time.monotonic() - begin, _peak(w.device), note)


def _attempt(method: OneShot, w: Tensor, h: Tensor, tokens: int, pattern: Pattern, wanda: Tensor) -> tuple[Tensor, Tensor, float, str]:
    """(new weights, mask, the damping that was needed, a note), with the mask of ``wanda`` if the method fails."""
    rule = FEW if tokens < ENOUGH * w.shape[1] else MANY
    damping = rule if method.damping is None else method.damping
    dead = h.diagonal() == 0
    for attempt in range(ATTEMPTS):
        try:
            start = w.clone()
            if damping:
                start[:, dead] *= NOTHING  # of inputs that were always zero the solver keeps what others leave, by magnitude
            z, mask = method.solve(start, damped(h, damping) if damping else h.clone(), pattern)
            del start
            z = torch.where(dead, w, z).masked_fill_(~mask, 0.0)
            if method.refit:  # without damping, the values of inputs that were never seen apart would explode
                damping = damping or rule
                z = refit(w, z.contiguous(), mask, damped(h, damping), method.refit)
            if bool(z.isfinite().all()):
                return z, mask, damping, f"damping raised to {damping:g}" if attempt else ""
            why = "the new weights were not finite"
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            why = "the Hessian could not be factorised"
        damping = max(damping, 1e-3) * 10
    return w * wanda, wanda, 0.0, f"Wanda's mask: {why} with damping up to {damping / 10:g}"


def _peak(device: torch.device) -> int:
    """The peak of a GPU's memory, or of that of the process; 0 where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def squared_error(w: Tensor, z: Tensor | None, h: Tensor) -> Tensor:
    """Σ over rows of (w − z) H (w − z)ᵀ, 0-d fp64: the mean over tokens of ‖x(W−Z)ᵀ‖². None: Z = 0."""
    total = torch.zeros((), dtype=torch.float64, device=w.device)
    for i in range(0, w.shape[0], ROWS):
        d = w[i : i + ROWS] if z is None else w[i : i + ROWS] - z[i : i + ROWS]
        total += ((d @ h).mul_(d)).sum(dtype=torch.float64)
    return total.clamp_min_(0.0)


def scales(h: Tensor) -> Tensor:
    """√H_jj, the size of each input, by which weights are weighed. One that was always zero counts so little that its weights come last in
    their group, by magnitude among themselves: they cost nothing, and are kept where others leave room.
    """
    diagonal = h.diagonal()
    live = diagonal > 0
    least = diagonal[live].min() if bool(live.any()) else torch.ones((), dtype=h.dtype, device=h.device)
    return torch.where(live, diagonal, least * NOTHING).sqrt()


def damped(h: Tensor, damping: float) -> Tensor:
    """H + damping · mean(diag H) · I; an input that was always zero counts like the mean of the others."""
    diagonal = h.diagonal()
    live = diagonal > 0
    mean = diagonal[live].mean() if bool(live.any()) else torch.ones((), dtype=h.dtype, device=h.device)
    h = h.clone()
    h.diagonal().masked_fill_(~live, 0.0).add_(torch.where(live, damping * mean, mean))
    return h


def refit(w: Tensor, z: Tensor, mask: Tensor, h: Tensor, steps: int) -> Tensor:
    """The values on ``mask`` that minimise the error, by conjugate gradients from ``z``, in place (ALPS, Algorithm 2).

    All rows go together, each with its own step sizes; the preconditioner is the diagonal of H. ``steps`` at most: it ends when a step
    lowers the error by less than a thousandth.
    """
    diagonal, eps = h.diagonal(), torch.finfo(h.dtype).eps
    inverse = 1 / diagonal
    for i in range(0, w.shape[0], ROWS):
        part, keep = z[i : i + ROWS], mask[i : i + ROWS]
        d = w[i : i + ROWS] - part
        r = d @ h
        error = float((d * r).sum())
        r.mul_(keep)
        p = r * inverse
        size = (r * p).sum(1, keepdim=True)
        for _ in range(steps):
            q = (p @ h).mul_(keep)
            curvature = (p * q).sum(1, keepdim=True)
            # of a singular H it may be rounding alone, even negative
            noise = p.square() @ diagonal[:, None] * (4 * eps)
            step = torch.where(curvature > noise.clamp_min_(TINY), size / curvature, 0.0)
            part.addcmul_(step, p)
            gain = float((step * size).sum())
            if gain < GAIN * error:
                break
            error -= gain
            r.addcmul_(step, q, value=-1)
            torch.mul(r, inverse, out=q)
            last, size = size, (r * q).sum(1, keepdim=True)
            p.mul_(size / last.clamp_min_(TINY)).add_(q)
    return z
