"""Search for the order of input channels under which an N:M mask keeps the most of a weight."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...pattern import Pattern, PatternLike, RecipeError, ShapeError

EXHAUSTIVE_M = 4
"""Up to this M every regrouping of two stripes is tried: 35 for M = 4; 6435 for M = 8 are too many, so that there only swaps are."""

ESCAPE = 4
"""Stripes that an escape rotates a column through; an exchange between two never helps, the next look at that pair undoes it."""

ALL_PAIRS = 256
"""Up to so many stripes every pair of them is tried; beyond, random pairings, because the number of pairs grows with its square."""

ROUNDS, PATIENCE, STOP_GAIN = 400, 8, 1e-4
"""Random pairings: at most so many rounds, and the end where the last ``PATIENCE`` of them brought less than this share."""

CHUNK = 1 << 17
"""Numbers per operation of the search: small enough to stay in a core's cache."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """A channel permutation and what it is worth.

    Args:
        order: int64 ``(cols,)``: column j of the permuted weight is column ``order[j]`` of the weight.
        before, after: shares of Σ|W| that the mask keeps, in the given and in the permuted order.
        bound: the share that the best mask without groups keeps: in each row the largest N/M of its elements. No order can exceed it.
    """

    order: Tensor
    before: float
    after: float
    bound: float

    @property
    def efficacy(self) -> float:
        """(after − before) / (bound − before): 0 for the given order, 1 at the bound; 1 too where nothing can be won."""
        return (self.after - self.before) / (self.bound - self.before) if self.bound > self.before else 1.0


def search_permutation(
    weight: Tensor, pattern: PatternLike = "2:4", escapes: int = 100, seed: int = 0, progress: Progress | None = None
) -> Found:
    """Order the columns of ``weight`` so that its N:M mask keeps more: maximise eff(P) = Σ |top-N of M of W[:, P]|.

    Pool and Yu, "Channel permutations for N:M sparsity", NeurIPS 2021; the default strategy of apex's ASP. A stripe is M consecutive
    columns. Of every pair of stripes the best regrouping of its 2M columns is found (of 35 for M = 4; for M > 4 only exchanges of one
    column for another are tried), those that gain are applied in falling order, each stripe at most once, and so on until no pair
    gains. An escape then rotates one random column through each of four random stripes and repeats this; it is kept if it ends higher.
    Beyond 256 stripes each round looks only at a random pairing of all stripes, and there are no escapes: the work then grows with the
    number of columns, not its square.

    Args:
        weight: ``(rows, cols)``; only magnitudes count. Several weights that read the same channels are given as one, row upon row.
        pattern: N:M; M must divide the columns.
        escapes: how many escapes are tried.
        seed: of the escapes and pairings; the same seed gives the same order.
        progress: called with a line of text about once every ten seconds.

    Raises:
        ShapeError: the weight is not a matrix, or M does not divide its columns. RecipeError: ``escapes`` is negative, or the weight
            has NaN or infinite values.

    Example:
        >>> w = torch.tensor([[4.0, 3.0, 2.0, 0.0, 1.0, 0.0, 0.0, 0.0]])
        >>> found = search_permutation(w, "2:4")
        >>> found.before, found.after
        (0.8, 1.0)
    """
    p = Pattern(pattern)
    if weight.dim() != 2:
        raise ShapeError(f"search_permutation: the weight must be a matrix (rows, cols), got shape {tuple(weight.shape)}.")
    p.check_divides("search_permutation", weight.shape[1])
    if escapes < 0:
        raise RecipeError(f"search_permutation: escapes={escapes} must be at least 0.")
    if not bool(torch.isfinite(weight).all()):
        raise RecipeError("search_permutation: the weight has NaN or infinite values.")
    with torch.no_grad():
        return _Search(weight, p, seed, progress).run(escapes)


class _Search:
    """The state of one search: which columns each stripe holds, and what every pair of stripes could gain."""

    def __init__(self, weight: Tensor, pattern: Pattern, seed: int, progress: Progress | None) -> None:
        wide = weight.detach().abs().to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
        self.columns = wide.t().contiguous()  # one channel per row: taking a column is then one copy
        self.pattern, self.device = pattern, weight.device
        self.stripes = torch.arange(weight.shape[1]).view(-1, pattern.m)
        self.generator = torch.Generator().manual_seed(seed)
        self.subsets, self.regroupings = _regroupings(pattern.m)
        self.progress, self.told = progress, time.monotonic()
        self.total = float(self.columns.sum(dtype=torch.float64))

    def run(self, escapes: int) -> Found:
        count = len(self.stripes)
        before = self.kept()
        if self.total > 0 and self.pattern.n < self.pattern.m and count > 1:
            if count <= ALL_PAIRS:
                self.climb_with_escapes(escapes if count > 2 else 0)
            else:
                self.random_pairings()
        stripes = self.stripes.sort(1).values
        order = stripes[stripes[:, 0].argsort()].flatten()
        after, share = self.kept(), self.total or 1.0
        if after <= before:  # nothing gained but rounding: leave the channels where they are
            order, after = torch.arange(len(order)), before
        keep = self.pattern.kept(len(order))
        bound = float(self.columns.topk(keep, dim=0).values.sum(dtype=torch.float64))
        return Found(order.to(self.device), before / share, after / share, bound / share)

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
            kept = [_top(both[:, list(s)], self.pattern).sum(1, dtype=torch.float64) for s in self.subsets]
            sums = torch.stack(kept, 1)
            each = torch.stack([sums[:, i] + sums[:, j] for i, j in self.regroupings], 1)
            value, index = each.max(1)
            best.append((value - each[:, 0]).cpu())
            which.append(index.cpu())
        return torch.cat(best), torch.cat(which)

    def regroup(self, a: int, b: int, which: int) -> None:
        """Give the columns of stripes ``a`` and ``b`` their new places."""
        both = torch.cat([self.stripes[a], self.stripes[b]])
        i, j = self.regroupings[which]
        self.stripes[a], self.stripes[b] = both[list(self.subsets[i])], both[list(self.subsets[j])]

    @property
    def least(self) -> float:
        """The smallest gain that is more than rounding."""
        return 1e-9 * self.total

    # ---- every pair of stripes

    def climb_with_escapes(self, escapes: int) -> None:
        count = len(self.stripes)
        first, second = torch.triu_indices(count, count, 1)
        gain, which = self.gains(first, second)
        gain, which = self.climb(first, second, gain, which)
        height = self.kept()
        for escape in range(escapes):
            old = self.stripes.clone(), gain.clone(), which.clone()
            some = torch.randperm(count, generator=self.generator)[:ESCAPE]
            column = torch.randint(self.pattern.m, (len(some),), generator=self.generator)
            self.stripes[some, column] = self.stripes[some.roll(1), column.roll(1)]
            gain, which = self.climb(first, second, *self.renewed(first, second, gain, which, some.tolist()))
            now = self.kept()
            if now > height + self.least:
                height = now
            else:
                self.stripes, gain, which = old
            self.tell(f"escape {escape + 1} of {escapes}", height)

    def climb(self, first: Tensor, second: Tensor, gain: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the best disjoint regroupings until no pair gains."""
        while True:
            changed: set[int] = set()
            order = gain.argsort(descending=True, stable=True)
            for pair in order[: int((gain > self.least).sum())].tolist():
                a, b = int(first[pair]), int(second[pair])
                if a not in changed and b not in changed:
                    self.regroup(a, b, int(which[pair]))
                    changed |= {a, b}
            if not changed:
                return gain, which
            gain, which = self.renewed(first, second, gain, which, changed)
            self.tell(f"{len(changed)} stripes changed", None)

    def renewed(self, first: Tensor, second: Tensor, gain: Tensor, which: Tensor, changed: Iterable[int]) -> tuple[Tensor, Tensor]:
        """The gains with those of the pairs that have a changed member measured again."""
        touched = torch.zeros(len(self.stripes), dtype=torch.bool)
        touched[list(changed)] = True
        stale = (touched[first] | touched[second]).nonzero().flatten()
        gain[stale], which[stale] = self.gains(first[stale], second[stale])
        return gain, which

    # ---- random pairings

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
            self.tell(f"round {turn + 1} of at most {ROUNDS}", None)

    def tell(self, what: str, height: float | None) -> None:
        """Report about once every ten seconds."""
        if self.progress is not None and time.monotonic() - self.told > 10:
            self.told = time.monotonic()
            self.progress(f"{what}, {(self.kept() if height is None else height) / self.total:.4f} of the magnitude kept")


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
def _regroupings(m: int) -> tuple[list[tuple[int, ...]], list[tuple[int, int]]]:
    """Ways to make two groups of ``2 m`` columns: the groups that occur, and pairs of them; the first pair leaves all as it is."""
    every = range(2 * m)
    if m <= EXHAUSTIVE_M:
        halves = [(0, *rest) for rest in itertools.combinations(range(1, 2 * m), m - 1)]
    else:
        halves = [tuple(range(m)), *[tuple(sorted({*range(m)} - {i} | {j})) for i in range(m) for j in range(m, 2 * m)]]
    subsets = [half for h in halves for half in (h, tuple(i for i in every if i not in h))]
    return subsets, [(2 * k, 2 * k + 1) for k in range(len(halves))]
