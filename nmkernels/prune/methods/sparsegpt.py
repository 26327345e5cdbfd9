"""SparseGPT: prune from the first column to the last, and let the columns behind make up for each error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...arguments import whole_number
from ...pattern import Pattern
from ..base import OneShot
from ..hessians import inverse_factor


@dataclass(frozen=True)
class SparseGPT(OneShot):
    """Optimal brain surgeon, column by column (Frantar and Alistarh, ICML 2023, arXiv 2301.00774, Algorithm 1).

    With U the upper Cholesky factor of H⁻¹: at the first column of each group the N largest (w/u_jj)² are kept; each pruned w leaves the
    error e = w/u_jj, and the weights of later columns k change by −e·u_jk. Within a group columns follow one another; what groups and
    blocks pass on is one GEMM each.

    Args:
        block: columns between two updates of the whole rest of the weight; rounded down to a multiple of M.
    """

    gemms: ClassVar[float] = 6

    damping: float | None = None
    block: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("block", whole_number)

    def solve(self, w: Tensor, h: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
        m, cols = pattern.m, w.shape[1]
        u = inverse_factor(h)
        block = max(m, self.block // m * m)
        # transposed: the weights of one column are contiguous
        wt, keep = w.t().contiguous(), torch.empty(w.shape[::-1], dtype=torch.bool, device=w.device)
        for begin in range(0, cols, block):
            end = min(begin + block, cols)
            errors = torch.zeros_like(wt[begin:end])
            for first in range(begin, end, m):
                group, factor = wt[first : first + m], u[first : first + m, first : first + m]
                scores = (group / factor.diagonal()[:, None]).t()
                keep[first : first + m] = self.mask(scores.contiguous(), pattern).t()
                pruned = ~keep[first : first + m]
                error = errors[first - begin : first - begin + m]
                for j in range(m):
                    torch.mul(group[j], pruned[j], out=error[j]).div_(factor[j, j])
                    group[j].masked_fill_(pruned[j], 0.0)
                    if j + 1 < m:
                        group[j + 1 :].addr_(factor[j, j + 1 :], error[j], alpha=-1)
                if first + m < end:
                    wt[first + m : end].addmm_(u[first : first + m, first + m : end].t(), error, alpha=-1)
            if end < cols:
                wt[end:].addmm_(u[begin:end, end:].t(), errors, alpha=-1)
        return wt.t(), keep.t()
