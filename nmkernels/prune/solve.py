"""Pruning one matrix: the damping that a method needs, and Wanda's mask where its result is worse."""

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
from .reconstruct import NOTHING, damped, refit, scales, squared_error

FEW, MANY = 0.1, 0.01
"""The damping below and from ``ENOUGH`` tokens per input on."""
ENOUGH = 4
ATTEMPTS = 5
"""Factorisations that are tried, each with ten times the damping."""


def solve(
    method: OneShot, weight: Tensor, h: Tensor, tokens: int, pattern: Pattern, integers: tuple[str, int | None] | None = None
) -> tuple[ops.Compressed, Pruned]:
    """Prune one matrix ``(out, in)`` with the Hessian H of its inputs; the new one is compressed, in the weight's dtype.

    A result whose error is larger than that of Wanda's mask is replaced by that mask, if the method is ``guarded``. ``integers``: (values,
    group) to report the error of; the result keeps floating-point values.
    """
    begin, damping = time.monotonic(), 0.0
    w = weight.to(wide(weight.dtype), copy=True)
    h = h.to(w.device)
    error = wanda = rounded = None
    size = float(squared_error(w, None, h))
    if tokens < pattern.m or not math.isfinite(size):
        note = "magnitude: " + ("its inputs overflow" if tokens >= pattern.m else f"{tokens or 'no'} tokens reached it")
        mask = method.mask(w, pattern)
        z = w * mask
    else:
        fallback = method.mask(w * scales(h), pattern)
        wanda = float(squared_error(w, (w * fallback).to(weight.dtype).to(w.dtype), h)) / (size or 1.0)
        z, mask, damping, note = _attempt(method, w, h, tokens, pattern)
        z = z.to(weight.dtype).to(w.dtype)
        error = float(squared_error(w, z, h)) / (size or 1.0)
        if method.guarded and not error <= wanda:
            z, mask, error = w * fallback, fallback, wanda
            note = note or "Wanda's mask, which has the smaller error"
    packed = ops.compress(z.to(weight.dtype), pattern, mask)
    if integers is not None and error is not None:
        rounded = float(squared_error(w, ops.quantize_values(packed, *integers).dense(w.dtype), h)) / (size or 1.0)
    return packed, Pruned(error, wanda, tokens, damping, time.monotonic() - begin, _peak(w.device), note, rounded)


def _attempt(method: OneShot, w: Tensor, h: Tensor, tokens: int, pattern: Pattern) -> tuple[Tensor, Tensor, float, str]:
    """(new weights, mask, the damping that was needed, a note)."""
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
    mask = method.mask(w * scales(h), pattern)
    return w * mask, mask, 0.0, f"Wanda's mask: {why} with damping up to {damping / 10:g}"


def _peak(device: torch.device) -> int:
    """The peak of a GPU's memory, or of that of the process; 0 where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
