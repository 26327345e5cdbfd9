"""Rounding with error compensation: integers that make up for each other's errors."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..ops.integers import BITS
from ..reference.integers import LARGEST, candidates, pack_integers, unpack_integers
from ..train.parts import stored
from .hessians import inverse_factor, wide
from .solve import ATTEMPTS, damped, squared_error

DAMPING = 0.1
"""The damping of H. With 0.01 the error is smaller on the calibration data, and larger on other data (MiniLM)."""
BLOCK = 128
"""Columns between two updates of all others: whole groups, or one larger group."""
SWEEPS = 2
"""How often steps and integers are chosen again."""
ROWS = 4096
"""Rows that are worked on together, which bounds temporary memory; rows are independent of each other."""


def round_values(packed: ops.Compressed, values: str, group: int | None, h: Tensor, tokens: int) -> ops.Compressed:
    """Q: ``packed`` ``(out, in)`` with its values rounded to integers so that ‖X(W − Q)ᵀ‖² is small, positions held; rounded to the nearest
    where the inputs tell nothing.

    First GPTQ on the kept values (Frantar et al., ICLR 2023, arXiv 2210.17323, Algorithm 1). With U the upper Cholesky factor of H⁻¹, from
    the first column to the last: q = w/step rounded, 0 where w is pruned, and the error e = (w − q·step)/u_jj changes the weights of later
    columns k by −e·u_jk. The step of a group is chosen at its first column: of those of ``ops.quantize_values`` the one with the least
    Σ (w − q·step)²/u_jj². Rows for which rounding to the nearest has the smaller error start from that instead. Then coordinate descent,
    ``SWEEPS`` times, with R = (W − Q)H: each group gets the step that is best for its integers as they are, and each column the integers
    q + R_j/(H_jj·step), rounded, which never makes the error larger. H is damped in all of this.

    Args:
        packed: with floating-point values.
        values, group: as for ``ops.quantize_values``.
        h, tokens: H = XᵀX / tokens ``(in, in)`` of the inputs, and how many they were.
    """
    nearest, dtype = ops.quantize_values(packed, values, group), wide(packed.dtype)
    assert nearest.step is not None
    w, h, mask = packed.dense(dtype), h.to(packed.device, dtype), stored(packed)
    if tokens < packed.pattern.m or not w.numel() or not bool(squared_error(w, None, h).isfinite()):
        return nearest
    (rows, cols), bits, damping = w.shape, BITS[values], DAMPING
    kept, group = packed.values.shape[1], cols // nearest.step.shape[1]
    for _ in range(ATTEMPTS):
        hessian = damped(h, damping)
        try:
            u = inverse_factor(hessian.clone())
            break
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            damping *= 10
    else:
        return nearest
    usual = ops.Compressed(unpack_integers(nearest.values, kept).to(dtype), packed.indices, packed.pattern, packed.shape).dense()
    integers, steps = [], []
    for part in (slice(i, i + ROWS) for i in range(0, rows, ROWS)):
        # transposed, so that the weights of one column are contiguous
        full, keep = (matrix[part].t().contiguous() for matrix in (w, mask))
        forms = [compensated(full.clone(), keep, u, group, bits), (usual[part].t().contiguous(), nearest.step[part].t().to(dtype))]
        errors = [((d := full - _dense(*form, group)) * (hessian @ d)).sum(0) for form in forms]
        q, step = (torch.where(errors[0] < errors[1], one, other) for one, other in zip(*forms, strict=True))
        for _ in range(SWEEPS):
            descend_(q, step, full, keep, hessian, group, bits)
        integers.append(pack_integers(q.t()[mask[part]].view(-1, kept).to(torch.int8), bits))
        steps.append(step.t().bfloat16())
    return ops.Compressed(torch.cat(integers), nearest.indices, nearest.pattern, nearest.shape, torch.cat(steps))


def compensated(w: Tensor, mask: Tensor, u: Tensor, group: int, bits: int) -> tuple[Tensor, Tensor]:
    """(integers ``(in, out)``, steps ``(groups, out)``) of GPTQ for ``w`` and ``mask`` ``(in, out)``; ``u`` is U, ``w`` is overwritten."""
    cols, block = len(w), _block(group, len(w))
    q, steps, importance = torch.zeros_like(w), w.new_zeros(cols // group, w.shape[1]), u.diagonal().square().reciprocal()
    for begin in range(0, cols, block):
        end = min(begin + block, cols)
        errors = torch.zeros_like(w[begin:end])
        for j in range(begin, end):
            if j % group == 0:
                members = slice(j, j + group)
                steps[j // group] = _step(w[members] * mask[members], importance[members], bits)
            step = steps[j // group]
            q[j] = _rounded(w[j], step, bits) * mask[j]
            error = torch.sub(w[j], q[j] * step, out=errors[j - begin]).div_(u[j, j])
            w[j + 1 : end].addr_(u[j, j + 1 : end], error, alpha=-1)
        w[end:].addmm_(u[begin:end, end:].t(), errors, alpha=-1)
    return q, steps


def descend_(q: Tensor, steps: Tensor, w: Tensor, mask: Tensor, h: Tensor, group: int, bits: int) -> None:
    """One pass of coordinate descent over ``steps`` and the integers ``q``, in place, towards ``w``; shapes as in ``compensated``."""
    cols, block = len(q), _block(group, len(q))
    r = h @ (w - _dense(q, steps, group))
    if group == cols:
        hq = h @ q
        r.addcmul_(hq, _refit_(steps[0], q, r, hq), value=-1)
    for begin in range(0, cols, block):
        end = min(begin + block, cols)
        near, rest = h[begin:end, begin:end], r[begin:end]
        before = _dense(q, steps, group, begin, end)
        for j in range(begin, end):
            step, i = steps[j // group], j - begin
            if group < cols and j % group == 0:
                hq = near[:, i : i + group] @ q[j : j + group]
                rest.addcmul_(hq, _refit_(step, q[j : j + group], rest[i : i + group], hq[i : i + group]), value=-1)
            new = _rounded(q[j] * step + rest[i] / h[j, j], step, bits) * mask[j]
            rest.addr_(near[i], (new - q[j]) * step, alpha=-1)
            q[j] = new
        moved = _dense(q, steps, group, begin, end).sub_(before)
        r[:begin].addmm_(h[:begin, begin:end], moved, alpha=-1)
        r[end:].addmm_(h[end:, begin:end], moved, alpha=-1)


def _refit_(step: Tensor, q: Tensor, r: Tensor, hq: Tensor) -> Tensor:
    """Give integers ``q`` the step with the least error, rounded to bfloat16, in place; returns by how much it has changed."""
    slope, curvature = (q * r).sum(0), (q * hq).sum(0)
    best = (step + slope / curvature).bfloat16().to(step.dtype)
    change = best - step
    better = change * (change * curvature - 2 * slope) < 0  # not where integers are all 0, which gives NaN
    step.copy_(torch.where(better, best, step))
    return torch.where(better, change, 0.0)


def _block(group: int, cols: int) -> int:
    return BLOCK if group == cols else max(group, BLOCK // group * group)


def _dense(q: Tensor, steps: Tensor, group: int, begin: int = 0, end: int | None = None) -> Tensor:
    """q · step of the columns from ``begin`` to ``end``."""
    part = q[begin:end]
    return part * steps[torch.arange(begin, begin + len(part), device=q.device) // group]


def _rounded(w: Tensor, step: Tensor, bits: int) -> Tensor:
    """The integers of ``w`` with ``step``, as ``ops.quantize_values`` rounds; 0 where the step is."""
    return (w / step).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-127 if bits == 8 else -8, LARGEST[bits])


def _step(w: Tensor, importance: Tensor, bits: int) -> Tensor:
    """The steps ``(out,)`` of kept weights ``(group, out)``, each with its importance ``(group,)``."""
    if bits == 8:
        return (w.abs().amax(0) / LARGEST[8]).bfloat16().to(w.dtype)
    best, least = w.new_zeros(w.shape[1]), torch.full_like(w[0], torch.inf)
    for each in candidates(w.gather(0, w.abs().argmax(0, keepdim=True))[0]):
        step = each.to(w.dtype)
        error = importance @ (w - _rounded(w, step, bits) * step).square_()
        best, least = torch.where(error < least, step, best), torch.minimum(error, least)
    return best
