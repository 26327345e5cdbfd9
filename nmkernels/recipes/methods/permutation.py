"""Search for the order of input channels under which an N:M mask keeps the most of a weight."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...arguments import whole_number
from ...pattern import Pattern, PatternLike, RecipeError, ShapeError

EXHAUSTIVE_M, ESCAPE = 4, 4
"""Up to this M every regrouping of two stripes is tried, 35 for M = 4, and beyond only swaps, as 6435 are too many for M = 8. The stripes
that an escape rotates a column through: an exchange between two never helps, the next look at that pair undoes it."""

ALL_PAIRS, ROUNDS, PATIENCE, STOP_GAIN = 256, 400, 8, 1e-4
"""The most stripes of which every pair is tried; and of the random pairings beyond: the most rounds, and the share that the last
``PATIENCE`` of them must bring."""

CHUNK = 1 << 17
"""Numbers per operation of the search: small enough to stay in a core's cache."""


@dataclass(frozen=True)
class Permutation:
    """A channel permutation and what it gains.

    Args:
        order: int64 ``(cols,)``: column j of the permuted weight is column ``order[j]`` of the weight.
        before, after: shares of Σ|W| that the mask keeps, in the original and in the permuted order.
        bound: the share that the largest N/M of each row would keep, which no order can exceed.
    """

    order: Tensor
    before: float
    after: float
    bound: float

    @property
    def efficacy(self) -> float:
        """(after − before) / (bound − before): 0 for the original order, 1 at the bound; 1 too where nothing can be gained."""
        return (self.after - self.before) / (self.bound - self.before) if self.bound > self.before else 1.0


def search_permutation(
    weight: Tensor, pattern: PatternLike = "2:4", escapes: int = 100, seed: int = 0, progress: Callable[[str], None] | None = None
) -> Permutation:
    """Order the columns of ``weight`` so that its N:M mask keeps more: maximise eff(P) = Σ |top-N of M of W[:, P]|.

    Pool and Yu, "Channel permutations for N:M sparsity", NeurIPS 2021; the default strategy of apex's ASP. A stripe is M consecutive
    columns. Of every pair of stripes the best regrouping of its 2M columns is found (for M > 4 only exchanges of one column for another),
    those that gain are applied, each stripe at most once, and so on until no pair gains. An escape then rotates one random column through
    each of four random stripes and repeats this; it is kept if it ends higher. Beyond 256 stripes each round looks only at a random
    pairing of all stripes, and there are no escapes.

    Args:
        weight: ``(rows, cols)``; only magnitudes count. Several weights that read the same channels are given as one, row upon row.
        pattern: N:M; M must divide the columns.
        escapes, seed: how many are tried; of them and of the pairings.
        progress: called with a line of text about once every ten seconds.

    Raises:
        ShapeError: no matrix, or M does not divide its columns.
        RecipeError: ``escapes`` is negative, a number is not whole, or the weight not finite.

    Example:
        >>> w = torch.tensor([[4.0, 3.0, 2.0, 0.0, 1.0, 0.0, 0.0, 0.0]])
        >>> result = search_permutation(w, "2:4")
        >>> result.before, result.after
        (0.8, 1.0)
    """
    p = Pattern(pattern)
    if weight.dim() != 2:
        raise ShapeError(f"search_permutation: the weight must be a matrix (rows, cols), got shape {tuple(weight.shape)}.")
    p.check_divides("search_permutation", weight.shape[1])
    escapes = whole_number(RecipeError, "search_permutation: escapes", escapes, least=0)
    seed = whole_number(RecipeError, "search_permutation: seed", seed, least=None)
    if not bool(torch.isfinite(weight).all()):
        raise RecipeError("search_permutation: the weight has NaN or infinite values.")
    with torch.no_grad():
        return _Search(weight, p, seed, progress).run(escapes)


class _Search:
    """Which columns each stripe holds, and what pairs of stripes could gain."""

    def __init__(self, weight: Tensor, pattern: Pattern, seed: int, progress: Callable[[str], None] | None) -> None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.columns = weight.detach().abs().to(wide).t().contiguous()  # one channel per row: taking a column is then one copy
        self.pattern, self.device = pattern, weight.device
        self.stripes = torch.arange(weight.shape[1]).view(-1, pattern.m)
        self.generator = torch.Generator().manual_seed(seed)
        self.progress, self.reported = progress, time.monotonic()
        self.total = float(self.columns.sum(dtype=torch.float64))
        self.least = 1e-9 * self.total  # the smallest gain that is more than rounding

    def run(self, escapes: int) -> Permutation:
        count, before = len(self.stripes), self.kept()
        if self.total > 0 and self.pattern.n < self.pattern.m and count > ALL_PAIRS:
            self.random_pairings()
        elif self.total > 0 and self.pattern.n < self.pattern.m and count > 1:
            self.all_pairs(escapes if count > 2 else 0)
        stripes = self.stripes.sort(1).values
        order = stripes[stripes[:, 0].argsort()].flatten()
        after, share = self.kept(), self.total or 1.0
        if after <= before:  # nothing gained but rounding: leave the channels where they are
            order, after = torch.arange(len(order)), before
        keep = self.pattern.kept(len(order))
        bound = float(self.columns.topk(keep, dim=0).values.sum(dtype=torch.float64))
        return Permutation(order.to(self.device), before / share, after / share, bound / share)

    def kept(self) -> float:
        """Σ of what the mask keeps with the present stripes."""
        parts = self.stripes.split(max(1, CHUNK // max(1, self.columns.shape[1] * self.pattern.m)))
        return sum(float(_top(self.columns[part.to(self.device)], self.pattern).sum(dtype=torch.float64)) for part in parts)

    def gains(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """For each pair of stripes the best gain (float64) and which regrouping gives it."""
        best, which = [], []
        size = max(1, CHUNK // max(1, self.columns.shape[1]))
        for a, b in zip(first.split(size), second.split(size), strict=True):
            both = self.columns[torch.cat([self.stripes[a], self.stripes[b]], 1).to(self.device)]
            sums = [_top(both[:, half], self.pattern).sum(1, dtype=torch.float64) for half in _halves(self.pattern.m)]
            each = torch.stack(sums[::2], 1) + torch.stack(sums[1::2], 1)
            value, index = each.max(1)
            best.append((value - each[:, 0]).cpu())
            which.append(index.cpu())
        return torch.cat(best), torch.cat(which)

    def regroup(self, a: int, b: int, which: int) -> None:
        both, halves = torch.cat([self.stripes[a], self.stripes[b]]), _halves(self.pattern.m)
        self.stripes[a], self.stripes[b] = both[halves[2 * which]], both[halves[2 * which + 1]]

    def all_pairs(self, escapes: int) -> None:
        count = len(self.stripes)
        self.pairs = torch.triu_indices(count, count, 1)
        self.gain, self.which = self.gains(*self.pairs)
        self.climb()
        height = self.kept()
        for escape in range(escapes):
            old = self.stripes.clone(), self.gain.clone(), self.which.clone()
            some = torch.randperm(count, generator=self.generator)[:ESCAPE]
            column = torch.randint(self.pattern.m, (len(some),), generator=self.generator)
            self.stripes[some, column] = self.stripes[some.roll(1), column.roll(1)]
            self.renew(some)
            self.climb()
            if (now := self.kept()) > height + self.least:
                height = now
            else:
                self.stripes, self.gain, self.which = old
            self.tell(f"escape {escape + 1} of {escapes}")

    def climb(self) -> None:
        """Apply the best disjoint regroupings until no pair gains."""
        while True:
            changed: set[int] = set()
            order = self.gain.argsort(descending=True, stable=True)
            for pair in order[: int((self.gain > self.least).sum())].tolist():
                a, b = self.pairs[:, pair].tolist()
                if a not in changed and b not in changed:
                    self.regroup(a, b, int(self.which[pair]))
                    changed |= {a, b}
            if not changed:
                return
            self.renew(torch.tensor(sorted(changed)))
            self.tell(f"{len(changed)} stripes changed")

    def renew(self, changed: Tensor) -> None:
        """Measure the gains of the pairs that have a changed member again."""
        touched = torch.zeros(len(self.stripes), dtype=torch.bool)
        touched[changed] = True
        stale = touched[self.pairs].any(0).nonzero().flatten()
        self.gain[stale], self.which[stale] = self.gains(*self.pairs[:, stale])

    def random_pairings(self) -> None:
        recent: list[float] = []
        half = len(self.stripes) // 2
        for turn in range(ROUNDS):
            shuffled = torch.randperm(len(self.stripes), generator=self.generator)
            first, second = shuffled[:half], shuffled[half : 2 * half]
            gain, which = self.gains(first, second)
            for pair in (gain > self.least).nonzero().flatten().tolist():
                self.regroup(int(first[pair]), int(second[pair]), int(which[pair]))
            recent.append(float(gain.clamp_min(0).sum()))
            if len(recent) >= PATIENCE and sum(recent[-PATIENCE:]) < STOP_GAIN * self.total:
                return
            self.tell(f"round {turn + 1} of at most {ROUNDS}")

    def tell(self, what: str) -> None:
        """Report about once every ten seconds."""
        if self.progress is not None and time.monotonic() - self.reported > 10:
            self.reported = time.monotonic()
            self.progress(f"{what}, {self.kept() / self.total:.4f} of the magnitude kept")


def _top(values: Tensor, pattern: Pattern) -> Tensor:
    """Σ of the N largest of the M values along dimension 1, element by element: ``(pairs, M, rows)`` -> ``(pairs, rows)``."""
    n, m = pattern.n, pattern.m
    if 2 * n > m:  # cheaper by what is left out
        return values.sum(1) + _top(-values, Pattern(m - n, m)) if n < m else values.sum(1)
    ranked: list[Tensor] = []  # largest first
    for i in range(m):
        value = values[:, i]
        for k, other in enumerate(ranked):
            ranked[k], value = torch.maximum(other, value), torch.minimum(other, value)
        if len(ranked) < n:
            ranked.append(value)
    return sum(ranked[1:], ranked[0])


@cache
def _halves(m: int) -> list[list[int]]:
    """The ways to make two groups of ``2 m`` columns, one group after the other; the first way leaves all as it is."""
    if m <= EXHAUSTIVE_M:
        ways = [[0, *rest] for rest in itertools.combinations(range(1, 2 * m), m - 1)]
    else:
        ways = [list(range(m)), *[sorted({*range(m)} - {i} | {j}) for i in range(m) for j in range(m, 2 * m)]]
    return [half for way in ways for half in (way, [i for i in range(2 * m) if i not in way])]
