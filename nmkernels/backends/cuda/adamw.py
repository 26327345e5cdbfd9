"""MaskedAdamW over any number of params: the scalars of each, one pass over all of them, the sum of the statistics.

Three launches, four where some params are flat in memory and others are not. The host reads no number of the device; it hands over a
table of addresses, which is made once and found again at the next call with the same tensors. All of it may be captured in a CUDA graph
if the step counts are on the device (``capturable=True``).

Step counts on the CPU, torch's default, are advanced there and travel as an argument. With ``found_inf`` on the device the host must then
know whether the step is skipped: it waits for that one element, as ``torch.optim.AdamW`` with a ``GradScaler`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._dispatch import Verdict
from .._adamw_plan import Lists, count, layout_of, of_one_kind, on_host, skipped, written
from .._pack import write_rows
from ._adamw_plan import Pack, cut, plan_of, upload
from ._core import DTYPES, core, queue, register, runnable
from .pack import pack

STATS = 9
SCALARS = 16
"""Words of 32 bits that the kernels keep of the numbers of a param."""

HYPER = 8
"""Elements of ``hyper`` that are used."""


LAYOUTS = {"canonical": 0, "mma.sp": 1, "wgmma.sp": 2}


def _fits(args: tuple[Any, ...], device: str) -> Verdict:
    """What it can run; step counts and ``hyper`` may be on the CPU."""
    params, grads, outs, hyper = args[0], args[1], args[6], args[7]
    alike = of_one_kind(params, grads, outs)
    if not alike[0]:
        return alike
    transposable, packs = (*args[16:18], False, None)[:2]
    if transposable and tuple(args[8:10]) != (2, 4):
        return False, f"it masks by tiles at 2:4 only, and this call is at {args[8]}:{args[9]}"
    if any(x.dtype == torch.float64 for x in packs or ()):
        return False, "it computes in float32, and float64 values are asked for"
    return runnable((*params[:1], *(x for x in grads if x.layout != torch.strided)) if params else [hyper], device)


def _packs(packs: Sequence[Tensor] | None, copies: list[tuple[Tensor, Tensor]]) -> list[Pack]:
    """Where the packed weights go; a buffer that the kernel cannot write is replaced by a copy, added to ``copies``."""
    if not packs:
        return []
    addresses = [x.data_ptr() if x.numel() else 0 for x in packs]
    for k, x in enumerate(packs):
        if addresses[k] & 15 or not x.is_contiguous():
            copies.append((x, torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)))
            addresses[k] = copies[-1][1].data_ptr()
    codes = [DTYPES[x.dtype] for x in packs[::2]]
    return [(*addresses[4 * i : 4 * i + 4], codes[2 * i] | codes[2 * i + 1] << 8) for i in range(len(packs) // 4)]


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


@register("nm_masked_adamw_", fits=_fits)
def masked_adamw_(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor], steps: Sequence[Tensor], outs: Sequence[Tensor], hyper: Tensor, n: int, m: int,
    frozen: bool = False, eps_inside: bool = False, maximize: bool = False, geometric: bool = False,
    grad_scale: Tensor | None = None, found_inf: Tensor | None = None,
    transposable: bool = False, packs: Sequence[Tensor] | None = None, layout: str = "canonical", out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``nm_masked_adamw_``; packed weights of other patterns than 2:4 take launches of their own."""
    like = params[0] if params else hyper
    device, kernels = like.device, core(like)
    scale = None if grad_scale is None else grad_scale.to(device, non_blocking=True)
    found = None if found_inf is None else found_inf.to(device, non_blocking=True)
    stats = torch.empty(STATS, dtype=torch.float64, device=device) if out is None else out
    held = [i for i, step in enumerate(steps) if on_host(step, device)]
    if held and skipped(found_inf, device):
        return stats.zero_()
    lists: Lists = [list(xs) for xs in (params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, outs, grads)]
    apart = packs if (n, m) != (2, 4) else None
    packs = None if apart else packs
    squares = transposable or bool(packs)
    how = cut(kernels, n, m, squares)
    strides = layout_of(lists, n, m, how[3])
    copies = list(written(lists, strides))
    packed = _packs(packs, copies)
    addresses = [step.data_ptr() for step in steps]
    for i in held:
        addresses[i] = 0
    plan, gradients = plan_of(lists, addresses, strides, packed, how, like)
    one, several = count(steps, held)
    counts = None if several is None else upload(several, like)
    scalars = torch.empty(len(steps), SCALARS, dtype=torch.int32, device=device)
    partials = torch.empty(STATS, plan.blocks, dtype=torch.float64, device=device)
    numbers, given = (None, hyper.tolist()[:HYPER]) if on_host(hyper, device) else (hyper.contiguous(), [0.0] * HYPER)
    kernels.masked_adamw(
        plan.table.data_ptr(), gradients.data_ptr(), plan.owners.data_ptr(), scalars.data_ptr(), partials.data_ptr(), stats.data_ptr(),
        len(steps), *plan.parts, _address(numbers), given, _address(counts), one, _address(scale), _address(found),
        n, m, frozen, eps_inside, maximize, geometric, bool(max_exp_avg_sqs),
        squares, transposable, _address(plan.packs), LAYOUTS[layout], *queue(like),
    )  # fmt: skip
    for target, copy in copies:
        target.copy_(copy)
    write_rows(pack, params, n, m, apart, layout, found)
    return stats
