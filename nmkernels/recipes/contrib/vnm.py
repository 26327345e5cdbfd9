"""V:N:M: blocks of rows that share the columns they keep, with N:M inside them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...autograd.transforms import WeightTransform, masked, reading
from ...ops.mask import nm_prune
from ...optim.rules import UpdateRule
from ...pattern import Pattern, RecipeError
from ..contract import About, LayerSetup, Recipe, Setup, Stage, State, choice, count, number
from ..registry import recipe

WIDTH, EXACT_M = 4, 8
"""Columns that a block keeps of every group, what 2:4 tensor cores multiply; the largest M where all C(M, 4) sets of them are tried."""


@dataclass(frozen=True)
class BlockColumns(WeightTransform):
    """W̃ = M_C(W) ⊙ C ⊙ W as ``VNM`` has it, C the held ``nm_columns``, bool ``(out / V, in)``; the gradient is passed straight through."""

    v: int = 64
    objective: str = "retained"

    reads = reading(nm_columns="held")

    def renew(self, weight: Tensor, extras: Sequence[Tensor | None], generator: torch.Generator) -> dict[str, Tensor]:
        return {"nm_columns": best_columns(weight, self.pattern.n, self.pattern.m, self.v, self.objective)}

    def kept(self, weight: Tensor, *extras: Tensor) -> Tensor:
        """C ⊙ M_C; where a row of a group has fewer than N non-zeros in the kept columns, fewer than N are kept."""
        columns = extras[0].repeat_interleave(self.v, 0)
        return torch.ops.nmkernels.nm_mask(masked(weight, columns), self.pattern.n, self.pattern.m) & columns

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        return nm_prune(masked(weight, extras[0].repeat_interleave(self.v, 0)), self.pattern.n, self.pattern.m, out=out)


def best_columns(weight: Tensor, n: int, m: int, v: int, objective: str = "retained") -> Tensor:
    """Which 4 columns of every group each block of V rows keeps, bool ``(out / V, in)``; ties go to the lower columns.

    The objective is ``VNM``'s; greedily it reaches at least 1 − 1/e of the best (Nemhauser et al. 1978).
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
    # sums of 16-bit magnitudes would be rounded
    column = [size[..., i].to(torch.promote_types(size.dtype, torch.float32)).contiguous() for i in range(m)]
    pairs = list(itertools.combinations(range(m), 2))
    high, low = ({(i, j): pick(column[i], column[j]) for i, j in pairs} for pick in (torch.maximum, torch.minimum))
    best = torch.full((size.shape[0], size.shape[2]), -1.0, dtype=torch.float64, device=size.device)
    which = torch.zeros_like(best, dtype=torch.int64)
    sets = list(itertools.combinations(range(m), WIDTH))
    for place, (a, b, c, d) in enumerate(sets):
        (p, q), (r, s) = (high[a, b], low[a, b]), (high[c, d], low[c, d])
        first = torch.maximum(p, r)
        if n == 1:
            magnitude = first
        elif n == 2:
            magnitude = first + torch.maximum(torch.minimum(p, r), torch.maximum(q, s))
        else:
            magnitude = p + q + r + s - (torch.minimum(q, s) if n == 3 else 0)
        total = magnitude.sum(1, dtype=torch.float64)
        better = total > best
        best, which = torch.where(better, total, best), torch.where(better, place, which)
    table = torch.zeros(len(sets), m, dtype=torch.bool).scatter_(1, torch.tensor(sets), True)
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


@recipe("vnm")
@dataclass(frozen=True)
class VNM(Recipe):
    """V:N:M (VENOM: Castro et al., SC 2023, arXiv 2310.02065; trained in "Beyond 2:4", arXiv 2410.16135).

    In each block of V rows, every group of M ≥ 4 columns keeps 4 for all V rows, and each row N of those 4. With C the kept columns and
    M_C(W) the N largest magnitudes inside them::

        y = x (M_C(W) ⊙ C ⊙ W)ᵀ        ∂L/∂W := gᵀ x + λ (1 − M_C ⊙ C) ⊙ W

    M_C follows the weight at every step. ``finish`` leaves M_C ⊙ C ⊙ W, which is N:M and is compressed as any other; no kernel here makes
    use of V yet.

    Args:
        v: V, rows of a block. Where it does not divide a layer's outputs, the greatest common divisor of the two is the layer's V.
        decay: λ of SR-STE, at least 0.
        every: applied steps between two choices of C; 0 chooses once, at the beginning.
        objective: ``"retained"`` chooses C to keep the largest Σ|w| after N:4: over all C(M, 4) sets of columns up to M = 8, then greedily;
            ``"sums"``: the 4 columns of largest Σ|w| before N:4, which keeps a little less and is far cheaper.

    Example:
        >>> VNM("2:8", v=16).stage({}).transform
        BlockColumns(pattern=Pattern("2:8"), v=16, objective='retained')
    """

    v: int = count(64, least=1, resume="same")
    decay: float = number(2e-4)
    every: int = count(10)
    objective: str = choice("retained", "sums")

    about = About(
        paper="Castro et al., SC 2023, arXiv 2310.02065; arXiv 2410.16135",
        patterns="N:M with N ≤ 4 ≤ M",
        extra_state="the kept columns of each block of V rows, a bit per column",
        cost="fprop at N/M; a search over sets of columns every 10 steps",
    )
    setup = Setup(
        needs_whole="chooses columns for blocks of rows of each whole weight",
        linear_only="chooses columns for blocks of a linear layer's outputs",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        p = Pattern(self.pattern)
        if not p.n <= 4 <= p.m:
            raise RecipeError(f"VNM: {p} keeps N of 4 columns out of M, so N ≤ 4 ≤ M must hold; 2:8 is the usual choice.")

    def stage(self, state: State) -> Stage:
        return Stage(phase=1, transform=self.final_transform(), rule=UpdateRule(masked=True, decay=self.decay), every=self.every)

    def final_transform(self) -> WeightTransform:
        return BlockColumns(Pattern(self.pattern), self.v, self.objective)

    def layer(self, pattern: Pattern, shape: tuple[int, int], transform: WeightTransform | None = None) -> LayerSetup:
        v = math.gcd(shape[0], self.v)
        adapted = replace(transform, v=v) if isinstance(transform, BlockColumns) else transform
        note = f"{v}:{pattern}" + (f", as v={self.v} does not divide {shape[0]} outputs" if v != self.v else "")
        return replace(super().layer(pattern, shape, adapted), note=note)
