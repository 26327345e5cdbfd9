"""The transform of the Adaptive Sparse Trainer: a held mask, and a decay of what it prunes whose strength the schedule raises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .transforms import WEIGHT, Reads, WeightTransform, masked


@dataclass(frozen=True)
class AnnealedMask(WeightTransform):
    """W̃ = M ⊙ W with M = M(W) as it was when last renewed, and λ (1 − M) ⊙ W as its penalty's gradient (AST, arXiv 2407.20584).

    M is ``nm_mask``, held; λ is ``nm_decay``, a 0-d tensor that the schedule writes.

    Example:
        >>> from nmkernels import Pattern
        >>> mask, w = torch.tensor([[True, False]]), torch.tensor([[1.0, -2.0]])
        >>> AnnealedMask(Pattern("1:2")).penalty(w, mask, torch.tensor(0.5))["weight"]
        tensor([[ 0., -1.]])
    """

    reads: ClassVar[Reads] = {"nm_mask": "held", "nm_decay": "fed"}

    def renew(self, weight: Tensor, extras: Sequence[Tensor | None], generator: torch.Generator) -> dict[str, Tensor]:
        return {"nm_mask": super().kept(weight)}

    def kept(self, weight: Tensor, *extras: Tensor) -> Tensor:
        return extras[0]

    def penalty(self, weight: Tensor, *extras: Tensor) -> dict[str, Tensor]:
        mask, decay = extras
        return {WEIGHT: masked(weight, ~mask) * decay}

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        return masked(weight, extras[0], out)
