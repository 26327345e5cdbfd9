"""MaskedAdamW over any number of params in three launches: the scalars of each, one pass over all of them, the statistics.

The host reads no number of the device. It hands over a table of addresses, which is made once and found again at the next call with the
same tensors, and launches the same kernels whatever the number of params; params of several dtypes, or of layouts that need other code,
take one main launch for each kind. All of it may be captured in a CUDA graph if the step counts are on the device
(``capturable=True``).

Step counts on the CPU, torch's default, are advanced there and travel as an argument. With ``found_inf`` on the device the host must then
know whether the step is skipped: it waits for that one element, as ``torch.optim.AdamW`` with a ``GradScaler`` does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..adamw_plan import Lists, count, layout_of, on_host, skipped, written
from ..pack import write_rows
from . import _adamw_kernels as k
from ._adamw_plan import Plan, plan_of
from ._adamw_table import upload
from ._launch import launch
from .pack import pack

BLOCK = 2048
"""Partials that the reduction adds at once, 8 a thread."""

FEW, SLICES = 32768, 64
"""Partials of a statistic up to which one program adds them, some 20 microseconds; of more (33 million weights) it takes slices first."""


def masked_adamw_(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor], steps: Sequence[Tensor], outs: Sequence[Tensor], hyper: Tensor, n: int, m: int,
    frozen: bool = False, eps_inside: bool = False, maximize: bool = False, geometric: bool = False,
    grad_scale: Tensor | None = None, found_inf: Tensor | None = None,
    transposable: bool = False, packs: Sequence[Tensor] | None = None, layout: str = "canonical", out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``nm_masked_adamw_``; packed weights take launches of their own."""
    device = params[0].device if params else hyper.device
    scale = None if grad_scale is None else grad_scale.to(device, non_blocking=True)
    found = None if found_inf is None else found_inf.to(device, non_blocking=True)
    stats = torch.empty(k.STATS, dtype=torch.float64, device=device) if out is None else out
    held = [i for i, step in enumerate(steps) if on_host(step, device)]
    if held and skipped(found_inf, device):
        return stats.zero_()
    lists: Lists = [list(xs) for xs in (params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, outs, grads)]
    strides = layout_of(lists, n, m, m & (m - 1) == 0)
    copies = list(written(lists, strides))
    addresses = [step.data_ptr() for step in steps]
    for i in held:
        addresses[i] = 0
    plan, gradients = plan_of(lists, addresses, strides, n, m, device)
    scalars = _scalars(plan, steps, held, hyper, found, frozen)
    partials = torch.empty(k.STATS, plan.programs, dtype=torch.float64, device=device)
    flags = {"FROZEN": frozen, "EPS_INSIDE": eps_inside, "MAXIMIZE": maximize, "GEOMETRIC": geometric, "TOP": bool(max_exp_avg_sqs)}
    for group in plan.groups:
        args = (plan.table, gradients, plan.owners, scalars, partials, group.first, plan.programs, scale, found)
        launch(k.adamw_kernel, group.programs, args, WORDS=plan.words, **group.constexprs, **flags)
    add_partials(partials, stats, found, _computed(n, frozen, geometric))
    for target, copy in copies:
        target.copy_(copy)
    write_rows(pack, params, n, m, packs, layout, found)
    return stats


def add_partials(partials: Tensor, stats: Tensor, found: Tensor | None, on: int, few: int = FEW) -> None:
    """stats = the sums of the rows of ``partials`` whose bit is set in ``on``, the last row's maximum; two launches for many columns."""
    programs = partials.shape[1]
    if programs > few:
        parts = torch.empty(k.STATS, SLICES, dtype=torch.float64, device=partials.device)
        launch(k.adamw_stats_kernel, k.STATS * SLICES, (partials, parts, found, programs, SLICES), warps=8, ON=on, BLOCK=BLOCK)
        partials, programs = parts, SLICES
    launch(k.adamw_stats_kernel, k.STATS, (partials, stats, found, programs, 1), warps=8, ON=on, BLOCK=BLOCK)


def _scalars(plan: Plan, steps: Sequence[Tensor], held: list[int], hyper: Tensor, found: Tensor | None, frozen: bool) -> Tensor:
    """Counts every step and launches the computation of the numbers of each param, ``(params, 12)`` in fp32."""
    device = plan.table.device
    one, several = count(steps, held)
    counts = None if several is None else upload(several, device)
    numbers, words = (None, _bits(hyper)) if on_host(hyper, device) else (hyper.contiguous(), [0] * 8)
    scalars = torch.empty(len(steps), k.SCALARS, dtype=torch.float32, device=device)
    args = (plan.table, scalars, found, numbers, counts, one, *words)
    launch(k.adamw_scalars_kernel, len(steps), args, warps=1, WORDS=plan.words, FROZEN=frozen)
    return scalars


def _bits(hyper: Tensor) -> list[int]:
    """What the host holds of hyper, as integers: an argument in floating point would be rounded to float32."""
    words: list[int] = hyper.contiguous().view(torch.int64).tolist()
    return words[:8]


def _computed(n: int, frozen: bool, geometric: bool) -> int:
    """Bit k says that statistic k has partials."""
    change = 0 if frozen else 0b1110 if geometric else 0b10
    return change | (0b1110000 if n else 0) | 0b110000000
