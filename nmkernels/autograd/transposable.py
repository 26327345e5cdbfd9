"""The transform of transposable masks: one mask that is N:M along rows and along columns, chosen now and then and held in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..ops import Packed, pack
from .transforms import Reads, Traits, WeightTransform, laid_out, masked


@dataclass(frozen=True)
class TransposableMask(WeightTransform):
    """W̃ = M ⊙ W with M N:M along both dimensions, so that W̃ is N:M in y = x W̃ᵀ and W̃ᵀ is in ∂L/∂x = g W̃ (FST; arXiv 2404.01847).

    M is ``nm_mask``, bool ``(out, in)``: of every M×M tile the choice of largest total magnitude (``nm.ops.transposable_mask``) at the last
    renewal, held in between while the weight moves on. The gradient is passed straight through.

    Args:
        pattern: N:M, along ``in`` and along ``out``.

    Example:
        >>> from nmkernels import Pattern
        >>> transform, w = TransposableMask(Pattern("1:2")), torch.tensor([[4.0, 3.0], [3.0, 1.0]])
        >>> transform(w, transform.renew(w, [None], torch.Generator())["nm_mask"])
        tensor([[0., 3.],
                [3., 0.]])
    """

    reads: ClassVar[Reads] = {"nm_mask": "held"}

    def _traits(self) -> Traits:
        return replace(super()._traits(), transposable=True)

    def renew(self, weight: Tensor, extras: Sequence[Tensor | None], generator: torch.Generator) -> dict[str, Tensor]:
        return {"nm_mask": torch.ops.nmkernels.nm_transposable_mask(weight, self.pattern.n, self.pattern.m)}

    def kept(self, weight: Tensor, *extras: Tensor) -> Tensor:
        return extras[0]

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        return masked(weight, extras[0], out)

    def packed(
        self, weight: Tensor, *extras: Tensor, dtype: torch.dtype, rows: bool = True, columns: bool = False, layout: str = "canonical"
    ) -> Packed:
        return pack(weight, laid_out(self.pattern, layout), extras[0], dtype=dtype, rows=rows, columns=columns, layout=layout, check=False)
