"""Packed operands and optimizer arguments that several test files build."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nmkernels import ops, reference, testing
from nmkernels.reference.adamw import AdamWArgs
from nmkernels.reference.adamw_pack import split
from nmkernels.testing.calls import hyper


def seed(word: int = 1, offset: int = 0) -> Tensor:
    return torch.tensor([word, offset], dtype=torch.int64)


def packed(rows: int, cols: int, n: int, m: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """values and indices of a random matrix; the last group may be partial."""
    c = ops.mvue_compress(torch.randn(cols, rows, dtype=dtype), f"{n}:{m}", dim=0, seed=3)
    return c.values, c.indices


def ordered(rows: int, cols: int, layout: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """values and metadata of a random 2:4 matrix."""
    d = ops.pack(torch.randn(rows, cols), "2:4", dtype=dtype, layout=layout).rows
    assert isinstance(d, ops.DeviceCompressed)
    return d.values, d.meta


def adamw(
    shapes: tuple[tuple[int, ...], ...] = ((6, 8), (3, 4)),
    n: int = 2,
    m: int = 4,
    dtype: torch.dtype = torch.float32,
    amsgrad: bool = False,
    scaled: bool = False,
    inf: bool = False,
    held: bool = False,
    fixed: bool = False,
    states: torch.dtype | None = None,
    stochastic: bool = False,
    **flags: Any,
) -> tuple[Any, ...]:
    """Arguments of the raw op ``nm_masked_adamw_``."""
    state = states or (torch.float64 if dtype == torch.float64 else torch.float32)

    def each(dtype: torch.dtype, positive: bool = False) -> list[Tensor]:
        made = [torch.randn(s).to(dtype) for s in shapes]
        return [x.abs() for x in made] if positive else made

    params, grads, first, second = each(dtype), each(dtype), each(state), each(state, positive=True)
    top, steps = each(state, positive=True) if amsgrad else [], [torch.tensor(4.0) for _ in shapes]
    step = AdamWArgs(params, grads, first, second, top, steps, hyper(1e-2, flags.pop("clamp", 0.0)), n, m, **flags)
    if scaled:
        step = step._replace(grad_scale=torch.tensor([8.0]), found_inf=torch.tensor([1.0 if inf else 0.0]))
    masks = [ops.mask_bits(torch.rand(s) < 0.5) for s in shapes] if held else None
    return tuple(step._replace(masks=masks, fixed=fixed, stochastic=stochastic, seed=7 if stochastic else 0))


def adamw_pack(
    select: str,
    layout: str,
    shapes: tuple[tuple[int, int], ...] = ((64, 64), (128, 192)),
    columns: bool = False,
    dense: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    """Arguments of the raw op ``nm_masked_adamw_pack_``, with poisoned forms in bf16."""
    held = select == "held"
    step = AdamWArgs(*adamw(shapes, *((0, 0) if held else (2, 4)), held=held, **options))
    masks = [reference.transposable_mask(torch.randn(shape), 2, 4) for shape in shapes] if held else None
    step = step._replace(masks=[ops.mask_bits(mask) for mask in masks] if masks else None)
    lists: list[list[Tensor]] = [[], [], [], [], []]
    for i, w in enumerate(step.params):
        mask = masks[i] if masks else None
        rule = "held" if held else "magnitude"
        for one, part in zip(lists, reference.pack(w, 2, 4, rule, mask, None, torch.bfloat16, True, columns, layout, dense), strict=True):
            one += (testing.fill_poison(part),) if part.numel() else ()
    scales = [torch.tensor(1.37) for _ in shapes] if select == "threshold" else []
    return 2, 4, select, layout, scales, *lists, *step


def pack_forms(select: str, layout: str, **options: Any) -> tuple[Any, ...]:
    """Arguments of the raw op ``nm_pack_forms_``, as those of ``adamw_pack``."""
    to, step = split(adamw_pack(select, layout, **options))
    return *to, step.params, step.masks
