"""Transforms whose product ∂L/∂x = g W̃ multiplies a weight of its own, N:M along ``out``, the dimension that this product sums over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .transforms import HardMask, Reads, WeightTransform, masked

CRITERIA = ("magnitude", "count")
"""What Bi-Mask's best permutation retains most of: Σ|w|, or the number of non-zeros."""


def pruned_along_out(weight: Tensor, n: int, m: int) -> Tensor:
    """``weight`` ``(out, in)`` with at most N non-zeros in every group of M consecutive rows of a column.

    Where M does not divide ``out`` the last group is short: N of its fewer rows are kept.

    Example:
        >>> pruned_along_out(torch.tensor([[1.0, 2.0], [3.0, 1.0], [4.0, 4.0]]), 1, 2)
        tensor([[0., 2.],
                [3., 0.],
                [4., 4.]])
    """
    rows = weight.shape[0]
    return torch.ops.nmkernels.nm_prune(F.pad(weight.t(), (0, -rows % m)), n, m)[:, :rows].t()


@dataclass(frozen=True)
class BiMasked(HardMask):
    """Bi-Mask (Zhang et al., ICML 2023): W̃ = W ⊙ b_f forward and W ⊙ b_b in ∂L/∂x, both N:M along what their product sums over.

    b_f is the mask M(W) by rows. b_b keeps, of W ⊙ b_f with its rows in the order ``nm_order``, the N largest magnitudes of every M
    consecutive rows of a column, so that b_b ⊆ b_f. The order, which decides how much of W ⊙ b_f is lost, is held: the best of
    ``draws`` random permutations when it was renewed. The masks follow the weight at every step.

    Args:
        pattern, chain: as for ``HardMask``.
        draws: number of permutations to choose from; 0 keeps the rows in their own order.
        criterion: see ``CRITERIA``.

    Example:
        >>> from nmkernels import Pattern
        >>> w = torch.tensor([[3.0, 0.0], [2.0, 0.0], [0.0, 1.0]])
        >>> BiMasked(Pattern("1:2")).for_dgrad(w, torch.tensor([0, 2, 1]))
        tensor([[3., 0.],
                [2., 0.],
                [0., 1.]])
    """

    draws: int = 100
    criterion: str = "magnitude"

    reads: ClassVar[Reads] = {"nm_order": "held"}

    def renew(self, weight: Tensor, extras: Sequence[Tensor | None], generator: torch.Generator) -> dict[str, Tensor]:
        """``nm_order``, int64 ``(out,)``: the first of the best of ``draws`` random permutations of the rows."""
        rows = weight.shape[0]
        if self.draws == 0:
            return {"nm_order": torch.arange(rows, device=weight.device)}
        sizes = torch.ops.nmkernels.nm_prune(weight, self.pattern.n, self.pattern.m).abs()
        orders = [torch.randperm(rows, generator=generator).to(weight.device) for _ in range(self.draws)]
        scores = torch.stack([self._retained(sizes[order]) for order in orders]).tolist()
        return {"nm_order": orders[scores.index(max(scores))]}

    def _retained(self, permuted: Tensor) -> Tensor:
        left = pruned_along_out(permuted, self.pattern.n, self.pattern.m)
        return left.sum(dtype=torch.float64) if self.criterion == "magnitude" else left.count_nonzero().double()

    def for_dgrad(self, used: Tensor, *extras: Tensor) -> Tensor:
        (order,) = extras
        result = torch.empty_like(used)
        result[order] = pruned_along_out(used[order], self.pattern.n, self.pattern.m)
        return result


@dataclass(frozen=True)
class DoublePruned(WeightTransform):
    """SLoPe (Mozaffari et al., ICLR 2025): W̃ = W, which a held row mask keeps N:M, forward; W^{R,C} in ∂L/∂x; a masked ∂L/∂W.

    The row mask ``nm_rows`` is that of the weight when the stage began and never changes. The column mask ``nm_columns``, the N largest
    magnitudes of every M consecutive rows of a column, is chosen anew now and then. For a random row mask it takes
    Σ_{j>N} C(M,j) s^j (1−s)^{M−j} (j−N)/M of all weights more, s = N/M: 12.5 % at 1:2, 9.4 % at 2:4, 5.8 % at 2:8 (where 3.39 % is
    reported, which that sum does not give; random weights lose 5.8 %).
    """

    reads: ClassVar[Reads] = {"nm_rows": "held", "nm_columns": "held"}

    def renew(self, weight: Tensor, extras: Sequence[Tensor | None], generator: torch.Generator) -> dict[str, Tensor]:
        """``nm_rows`` once and for all, and ``nm_columns`` of the present weight, both bool ``(out, in)``."""
        n, m, rows = self.pattern.n, self.pattern.m, extras[0]
        if rows is None:
            rows = torch.ops.nmkernels.nm_mask(weight, n, m)
        # a weight that the row mask keeps may be 0 now and grow before the next renewal: it still goes before one that is pruned
        sizes = weight.abs().clamp_min(torch.finfo(weight.dtype).tiny).masked_fill(~rows, 0.0)
        return {"nm_rows": rows, "nm_columns": (pruned_along_out(sizes, n, m) != 0).contiguous()}

    def kept(self, weight: Tensor, *extras: Tensor) -> Tensor:
        return extras[0]

    def for_dgrad(self, used: Tensor, *extras: Tensor) -> Tensor:
        return masked(used, extras[1])

    def gradient(self, g: Tensor, weight: Tensor, *extras: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        return masked(g, extras[0]), {}
