"""The forms of several weights that GEMMs read, written over earlier ones, alone or after a step of MaskedAdamW."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .adamw import AdamWArgs, mask_of, masked_adamw_
from .pack import pack


class FormArgs(NamedTuple):
    """The first arguments of ``nm_pack_forms_`` and ``nm_masked_adamw_pack_``, in the order of their schemas.

    The lists have one tensor per weight, or none where that part is not wanted: what ``nm_pack`` returns of it. Values without indices, by
    held masks: the indices are those of the mask already.
    """

    n: int
    m: int
    select: str
    layout: str
    scales: Sequence[Tensor]
    values: Sequence[Tensor]
    indices: Sequence[Tensor]
    values_t: Sequence[Tensor]
    indices_t: Sequence[Tensor]
    dense: Sequence[Tensor]

    @property
    def parts(self) -> tuple[Sequence[Tensor], ...]:
        """The lists that the step writes, in the order of what ``nm_pack`` returns."""
        return self[5:]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the forms."""
        return (self.values or self.values_t or self.dense)[0].dtype


def split(args: Sequence[Any]) -> tuple[FormArgs, AdamWArgs]:
    """The arguments of ``nm_masked_adamw_pack_`` as those of the forms and those of the step."""
    count = len(FormArgs._fields)
    return FormArgs(*args[:count]), AdamWArgs(*args[count:])


@torch.no_grad()
def pack_forms_(*args: Any) -> None:
    """``pack`` of each weight into the given tensors; the last two arguments are the weights and the bits of held masks, or none."""
    _write(FormArgs(*args[:-2]), *args[-2:])


@torch.no_grad()
def masked_adamw_pack_(*args: Any) -> Tensor:
    """``masked_adamw_``, then ``pack`` of each new weight into the given tensors; a skipped step writes nothing. Returns the statistics."""
    to, a = split(args)
    stats = masked_adamw_(*a)
    if stats[0] != 0:
        _write(to, a.params, a.masks)
    return stats


def _write(to: FormArgs, weights: Sequence[Tensor], masks: Sequence[Tensor] | None) -> None:
    rows, columns, dense = bool(to.values), bool(to.values_t), bool(to.dense)
    for i, w in enumerate(weights):
        mask = mask_of(masks[i], w.shape[1]) if to.select == "held" and masks else None
        scale = to.scales[i] if to.scales else None
        made = pack(w, to.n, to.m, to.select, mask, scale, to.dtype, rows, columns, to.layout, dense)
        for buffers, part in zip(to.parts, made, strict=True):
            if buffers:
                buffers[i].copy_(part)
