"""MaskedAdamW on strided views: nothing is copied unless a tensor has no single stride between rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._dispatch import Verdict
from ._core import DTYPES, contiguous, core, register, row_count, runnable, tensors


def _supports_adamw(params: Sequence[Tensor], *args: Any) -> Verdict:
    if any(p.dtype == torch.float64 for p in params):
        return False, "it computes in float32, and a parameter is float64"
    return runnable(tensors((params, *args)))


def _row_stride(x: Tensor) -> int | None:
    """The one stride between rows of ``x`` seen as ``(rows, last dimension)``; None where no single stride exists."""
    step, reach = 0, None
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if reach is None:
            step = stride
        elif stride != reach:
            return None
        reach = stride * size
    return step


class _Views:
    """The 2-D views of one call's tensors; one that has no such view works on a copy, which ``write_back`` returns."""

    def __init__(self) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.alive: list[Tensor] = []

    def view(self, x: Tensor | None, written: bool = True) -> Any:
        """The core's description of ``x``; None gives the absent view."""
        if x is None:
            return core().View()
        row_stride = None if x.is_neg() else _row_stride(x)
        if row_stride is None:
            copy = contiguous(x)
            self.copies += [(x, copy)] if written else []
            x, row_stride = copy, x.shape[-1] if x.dim() else 1
        self.alive.append(x)
        return core().View(x.data_ptr(), DTYPES[x.dtype], row_stride, x.stride(-1) if x.dim() else 1)

    def write_back(self) -> None:
        """Copy what the core wrote into copies back to where it belongs."""
        for target, copy in self.copies:
            target.copy_(copy)


@register("nm_masked_adamw_", _supports_adamw)
def _masked_adamw(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor], steps: Sequence[Tensor], outs: Sequence[Tensor], hyper: Tensor, n: int, m: int,
    frozen: bool, eps_inside: bool, maximize: bool, geometric: bool, grad_scale: Tensor | None, found_inf: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    views, absent = _Views(), [None] * len(params)
    described = []
    rest = zip(grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs or absent, steps, outs or absent, strict=True)
    for p, (grad, avg, sq, top, step, masked) in zip(params, rest, strict=True):
        cols = p.shape[-1] if p.dim() else 1
        one = [views.view(p), views.view(grad, written=False), *(views.view(x) for x in (avg, sq, top, masked))]
        described.append(core().AdamWParam(row_count(p, cols), cols, step.data_ptr(), *one))
    scale, skip = (0 if x is None else x.data_ptr() for x in (grad_scale, found_inf))
    stats = core().masked_adamw(
        described, hyper.tolist(), n, m, frozen, eps_inside, maximize, geometric, scale, skip, torch.get_num_threads()
    )
    views.write_back()
    result = torch.tensor(stats, dtype=torch.float64)
    return result if out is None else out.copy_(result)
