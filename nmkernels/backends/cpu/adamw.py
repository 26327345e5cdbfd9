"""MaskedAdamW on strided views: nothing is copied unless a tensor has no single stride between rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...dispatch import Verdict
from ..pack import write_rows
from ..tensors import row_stride, tensors
from .core import DTYPES, contiguous, core, register, row_count, runnable
from .groups import nm_pack


def _supports_adamw(params: Sequence[Tensor], *args: Any) -> Verdict:
    if any(p.dtype == torch.float64 for p in params):
        return False, "it computes in float32, and a parameter is float64"
    if any(args[15:16]):
        return False, "it masks by the magnitudes of rows, and transposable masks are asked for, which the reference takes"
    lists = [params, *(x for x in args if isinstance(x, (list, tuple)))]
    if all(x.is_cpu and x.layout is torch.strided for xs in lists for x in xs):
        return runnable(x for x in args if isinstance(x, Tensor))
    return runnable(tensors((params, *args)))


_ABSENT = (0, 0, 0, 0)


def _view(x: Tensor | None, copies: list[tuple[Tensor, Tensor]]) -> tuple[int, int, int, int]:
    """Address, dtype, row stride and column stride of ``x``; one that has no such view is replaced by a copy, added to ``copies``."""
    if x is None:
        return _ABSENT
    if x.is_neg():
        step = None
    elif x.is_contiguous():
        return x.data_ptr(), DTYPES[x.dtype], x.shape[-1] if x.dim() else 1, 1
    else:
        step = row_stride(x)
    if step is None:
        copies.append((x, contiguous(x)))
        return _view(copies[-1][1], copies)
    return x.data_ptr(), DTYPES[x.dtype], step, x.stride(-1)


@register("nm_masked_adamw_", _supports_adamw)
def _masked_adamw(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor], steps: Sequence[Tensor], outs: Sequence[Tensor], hyper: Tensor, n: int, m: int,
    frozen: bool, eps_inside: bool, maximize: bool, geometric: bool, grad_scale: Tensor | None, found_inf: Tensor | None,
    transposable: bool = False, packs: Sequence[Tensor] | None = None, layout: str = "canonical", out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    written: list[tuple[Tensor, Tensor]] = []
    read: list[tuple[Tensor, Tensor]] = []
    absent = [None] * len(params)
    words: list[int] = []
    rest = zip(grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs or absent, steps, outs or absent, strict=True)
    for p, (grad, avg, sq, top, step, masked) in zip(params, rest, strict=True):
        cols = p.shape[-1] if p.dim() else 1
        words += (row_count(p, cols), cols, step.data_ptr())
        words += _view(p, written)
        words += _view(grad, read)
        words += _view(avg, written)
        words += _view(sq, written)
        words += _view(top, written)
        words += _view(masked, written)
    scale, skip = (0 if x is None else x.data_ptr() for x in (grad_scale, found_inf))
    stats = core().masked_adamw(words, hyper.tolist(), n, m, frozen, eps_inside, maximize, geometric, scale, skip, torch.get_num_threads())
    for target, copy in written:
        target.copy_(copy)
    if stats[0]:  # not skipped
        write_rows(nm_pack, params, n, m, packs, layout)
    result = torch.tensor(stats, dtype=torch.float64)
    return result if out is None else out.copy_(result)
