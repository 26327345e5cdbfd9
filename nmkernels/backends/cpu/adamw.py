"""MaskedAdamW on strided views; a tensor is copied only if it has no single stride between rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...dispatch import Verdict
from ...reference.adamw import AdamWArgs
from ..adamw import with_plain_masks
from ..shared import address, contiguous, row_stride, tensors
from .core import DTYPES, core, register, runnable


def _supports(*args: Any) -> Verdict:
    if any(p.dtype == torch.float64 for p in args[0]):
        return False, "it computes in float32, and a parameter is float64"
    return runnable(tensors(args))


def _view(x: Tensor, copies: list[tuple[Tensor, Tensor]]) -> tuple[int, int, int, int]:
    """Address, dtype, row stride and column stride of ``x``, or of a contiguous copy, which is then added to ``copies``."""
    step = None if x.is_neg() else row_stride(x)
    if step is None:
        copies.append((x, contiguous(x)))
        x = copies[-1][1]
        step = x.shape[-1] if x.dim() else 1
    return x.data_ptr(), DTYPES[x.dtype], step, x.stride(-1) if x.dim() else 1


@register("nm_masked_adamw_", _supports)
def _masked_adamw(*args: Any, out: Tensor | None = None) -> Tensor:
    a = with_plain_masks(AdamWArgs(*args))
    written: list[tuple[Tensor, Tensor]] = []
    read: list[tuple[Tensor, Tensor]] = []
    lists = (a.params, written), (a.grads, read), (a.exp_avgs, written), (a.exp_avg_sqs, written), (a.max_exp_avg_sqs, written)
    words: list[int] = []
    for i, p in enumerate(a.params):
        cols = p.shape[-1] if p.dim() else 1
        words += (p.numel() // cols if cols else 0, cols, a.steps[i].data_ptr(), a.masks[i].data_ptr() if a.masks else 0)
        for xs, copies in lists:
            if not xs:
                words += (0, 0, 0, 0)
            elif xs[i].is_contiguous() and not xs[i].is_neg():
                words += (xs[i].data_ptr(), DTYPES[xs[i].dtype], cols, 1)
            else:
                words += _view(xs[i], copies)
    flags = a.frozen, a.eps_inside, a.maximize, a.geometric, bool(a.masks), a.fixed, a.stochastic, a.seed
    scalars = address(a.grad_scale), address(a.found_inf), torch.get_num_threads()
    stats = torch.tensor(core().masked_adamw(words, a.hyper.tolist(), a.n, a.m, *flags, *scalars), dtype=torch.float64)
    for target, copy in written:
        target.copy_(copy)
    return stats if out is None else out.copy_(stats)
