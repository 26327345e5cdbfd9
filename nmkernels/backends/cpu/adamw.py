"""MaskedAdamW on strided views: nothing is copied unless a tensor has no single stride between rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...dispatch import Verdict
from ..shared import address, contiguous, row_stride, tensors, write_rows
from .core import DTYPES, core, register, runnable
from .groups import nm_pack


def _supports(params: Sequence[Tensor], *args: Any) -> Verdict:
    if any(p.dtype == torch.float64 for p in params):
        return False, "it computes in float32, and a parameter is float64"
    if any(args[15:16]):
        return False, "it masks by the magnitudes of rows, and transposable masks are asked for, which the reference takes"
    return runnable(tensors((params, *args)))


def _view(x: Tensor, copies: list[tuple[Tensor, Tensor]]) -> tuple[int, int, int, int]:
    """Address, dtype, row stride and column stride of ``x``; one that has no such view is replaced by a copy, added to ``copies``."""
    step = None if x.is_neg() else row_stride(x)
    if step is None:
        copies.append((x, contiguous(x)))
        x = copies[-1][1]
        step = x.shape[-1] if x.dim() else 1
    return x.data_ptr(), DTYPES[x.dtype], step, x.stride(-1) if x.dim() else 1


ABSENT = 0, 0, 0


def _packed_view(values: Tensor, indices: Tensor, layout: str) -> tuple[int, int, int]:
    """Address and dtype of the values and address of the indices; ``ABSENT`` of what is not wanted or the kernel cannot write."""
    writable = layout == "canonical" and values.dtype != torch.float64 and values.is_contiguous() and indices.is_contiguous()
    return (values.data_ptr(), DTYPES[values.dtype], indices.data_ptr()) if writable and values.numel() else ABSENT


@register("nm_masked_adamw_", _supports)
def _masked_adamw(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor], steps: Sequence[Tensor], outs: Sequence[Tensor], hyper: Tensor, n: int, m: int,
    frozen: bool, eps_inside: bool, maximize: bool, geometric: bool, grad_scale: Tensor | None, found_inf: Tensor | None,
    transposable: bool = False, packs: Sequence[Tensor] | None = None, layout: str = "canonical", out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    written: list[tuple[Tensor, Tensor]] = []
    read: list[tuple[Tensor, Tensor]] = []
    lists = (params, written), (grads, read), (exp_avgs, written), (exp_avg_sqs, written), (max_exp_avg_sqs, written), (outs, written)
    words: list[int] = []
    for i, p in enumerate(params):
        cols = p.shape[-1] if p.dim() else 1
        words += (p.numel() // cols if cols else 0, cols, steps[i].data_ptr())
        for xs, copies in lists:
            if not xs:
                words += (0, 0, 0, 0)
            elif xs[i].is_contiguous() and not xs[i].is_neg():
                words += (xs[i].data_ptr(), DTYPES[xs[i].dtype], cols, 1)
            else:
                words += _view(xs[i], copies)
        words += _packed_view(packs[4 * i], packs[4 * i + 1], layout) if packs else ABSENT
    flags = frozen, eps_inside, maximize, geometric, address(grad_scale), address(found_inf)
    stats = core().masked_adamw(words, hyper.tolist(), n, m, *flags, torch.get_num_threads())
    for target, copy in written:
        target.copy_(copy)
    if packs and stats[0]:  # not skipped
        for i, p in enumerate(params):
            if _packed_view(packs[4 * i], packs[4 * i + 1], layout) == ABSENT:
                write_rows(nm_pack, [p], n, m, packs[4 * i : 4 * i + 4], layout)
    result = torch.tensor(stats, dtype=torch.float64)
    return result if out is None else out.copy_(result)
