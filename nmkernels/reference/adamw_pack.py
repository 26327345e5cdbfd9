"""A step of MaskedAdamW that also writes the forms of the new weights which GEMMs read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .adamw import AdamWArgs, mask_of, masked_adamw_
from .pack import pack


class FormArgs(NamedTuple):
    """The first arguments of ``nm_masked_adamw_pack_``, in the order of its schema; the rest are ``AdamWArgs``.

    The lists have one tensor per param, or none where that part is not wanted: what ``nm_pack`` returns of it.
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
def masked_adamw_pack_(*args: Any) -> Tensor:
    """``masked_adamw_``, then ``pack`` of each new weight into the given tensors; a skipped step writes nothing. Returns the statistics."""
    to, a = split(args)
    stats = masked_adamw_(*a)
    if stats[0] == 0:
        return stats
    for i, w in enumerate(a.params):
        mask = mask_of(a.masks[i], w.shape[1]) if to.select == "held" and a.masks else None
        scale = to.scales[i] if to.scales else None
        rows, columns, dense = bool(to.values), bool(to.values_t), bool(to.dense)
        made = pack(w, to.n, to.m, to.select, mask, scale, to.dtype, rows, columns, to.layout, dense)
        for buffers, part in zip(to.parts, made, strict=True):
            if buffers:
                buffers[i].copy_(part)
    return stats
