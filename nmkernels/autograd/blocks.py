"""V:N:M masks: in blocks of V rows a few columns of every group are kept for all rows, and N:M inside them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .transforms import Reads, WeightTransform

WIDTH = 4
"""Columns that a block keeps of every group: what 2:4 tensor cores multiply."""

EXACT_M = 8
"""Up to here all C(M, 4) sets of columns are tried, 70 at M = 8."""

OBJECTIVES = ("retained", "sums")


@dataclass(frozen=True)
class BlockColumns(WeightTransform):
    """W̃ = C ⊙ M_C(W) ⊙ W: C keeps 4 columns of every group for V rows together, M_C the N largest magnitudes of those 4 in each row.

    V:N:M of VENOM (Castro et al., SC 2023, arXiv 2310.02065). C, which the transform holds, is chosen by ``best_columns``; M_C
    follows the weight. The result is N:M. The gradient is passed straight through.

    Args:
        pattern: N:M, with N ≤ 4 ≤ M; groups along the last dimension.
        v: rows of a block; must divide those of the weight.
        objective: see ``best_columns``.

    Example:
        >>> from nmkernels import Pattern
        >>> w = torch.tensor([[5.0, 1.0, 0.0, 3.0, 4.0, 0.0], [1.0, 2.0, 6.0, 0.0, 3.0, 4.0]])
        >>> BlockColumns(Pattern("2:6"), v=2)(w, best_columns(w, 2, 6, v=2))
        tensor([[5., 0., 0., 0., 4., 0.],
                [0., 0., 6., 0., 0., 4.]])
    """

    v: int = 64
    objective: str = "retained"

    reads: ClassVar[Reads] = {"nm_columns": "held"}

    def renew(self, weight: Tensor, extras: Sequence[Tensor | None], generator: torch.Generator) -> dict[str, Tensor]:
        """``nm_columns``, C with one row for each block: bool ``(out / V, in)``."""
        return {"nm_columns": best_columns(weight, self.pattern.n, self.pattern.m, self.v, self.objective)}

    def _inside(self, weight: Tensor, columns: Tensor) -> Tensor:
        return torch.where(columns.repeat_interleave(self.v, 0), weight, torch.zeros((), dtype=weight.dtype, device=weight.device))

    def kept(self, weight: Tensor, *extras: Tensor) -> Tensor:
        """C ⊙ M_C; where a row of a group has fewer than N non-zeros in the kept columns, fewer than N are kept."""
        inside = self._inside(weight, extras[0])
        return torch.ops.nmkernels.nm_mask(inside, self.pattern.n, self.pattern.m) & extras[0].repeat_interleave(self.v, 0)

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        raw, inside = torch.ops.nmkernels, self._inside(weight, extras[0])
        if out is None:
            return raw.nm_prune(inside, self.pattern.n, self.pattern.m)
        raw.nm_prune_out(inside, self.pattern.n, self.pattern.m, out=out)
        return out


def best_columns(weight: Tensor, n: int, m: int, v: int, objective: str = "retained") -> Tensor:
    """Which 4 columns of every group each block of V rows keeps, bool ``(out / V, in)``; ties go to the lower columns.

    Args:
        weight: ``(out, in)``.
        objective: ``"retained"``: the largest Σ|w| that is left after N:4 in each row; over all sets of columns where M ≤ 8, and above
            greedily, one column after the other by what it adds. That sum is submodular in the set, so greedy reaches at least 1 − 1/e of
            the best (Nemhauser et al. 1978). ``"sums"``: the 4 columns of largest Σ|w| before N:4, which is cheap.

    Example:
        >>> w = torch.tensor([[5.0, 1.0, 0.0, 3.0, 4.0, 0.0], [1.0, 2.0, 6.0, 0.0, 3.0, 4.0]])
        >>> best_columns(w, 1, 6, 2).int()
        tensor([[1, 1, 1, 1, 0, 0]], dtype=torch.int32)
    """
    rows, cols = weight.shape
    size = weight.abs().reshape(rows // v, v, cols // m, m)
    if m <= WIDTH:
        return torch.ones(rows // v, cols, dtype=torch.bool, device=weight.device)
    if objective == "sums":
        sums = size.sum(1, dtype=torch.float64).reshape(rows // v, cols)
        return torch.ops.nmkernels.nm_mask(sums, WIDTH, m)
    chosen = _exact(size, n) if m <= EXACT_M else _greedy(size, n)
    return chosen.reshape(rows // v, cols)


def _exact(size: Tensor, n: int) -> Tensor:
    """The best of all sets of columns; ``size`` is (blocks, V, groups, M)."""
    m = size.shape[-1]
    column = [size[..., i].contiguous() for i in range(m)]
    high = {(i, j): torch.maximum(column[i], column[j]) for i, j in itertools.combinations(range(m), 2)}
    low = {(i, j): torch.minimum(column[i], column[j]) for i, j in itertools.combinations(range(m), 2)}
    best = torch.full((size.shape[0], size.shape[2]), -1.0, dtype=torch.float64, device=size.device)
    which = torch.zeros_like(best, dtype=torch.int64)
    sets = list(itertools.combinations(range(m), WIDTH))
    for place, (a, b, c, d) in enumerate(sets):
        (p, q), (r, s) = (high[a, b], low[a, b]), (high[c, d], low[c, d])
        first = torch.maximum(p, r)
        if n == 1:
            kept = first
        elif n == 2:
            kept = first + torch.maximum(torch.minimum(p, r), torch.maximum(q, s))
        else:
            kept = p + q + r + s - (torch.minimum(q, s) if n == 3 else 0)
        total = kept.sum(1, dtype=torch.float64)
        better = total > best
        best, which = torch.where(better, total, best), torch.where(better, place, which)
    table = torch.zeros(len(sets), m, dtype=torch.bool)
    table[torch.arange(len(sets))[:, None], torch.tensor(sets)] = True
    return table.to(size.device)[which]


def _greedy(size: Tensor, n: int) -> Tensor:
    """One column after the other, each the one that adds most to Σ of the N largest of every row."""
    blocks, v, groups, m = size.shape
    top = size.new_zeros(blocks, v, groups, n)
    chosen = torch.zeros(blocks, groups, m, dtype=torch.bool, device=size.device)
    for _ in range(WIDTH):
        gain = (size - top[..., -1:]).clamp_min(0).sum(1, dtype=torch.float64).masked_fill(chosen, -math.inf)
        at = gain.argmax(-1, keepdim=True)
        chosen.scatter_(-1, at, True)
        new = size.gather(-1, at[:, None].expand(blocks, v, groups, 1))
        top = torch.cat([top, new], -1).topk(n, -1).values
    return chosen
