"""Transposable masks: n of every m kept along rows and columns, with the largest total magnitude.

Hubara, Chmiel, Island, Banner, Naor, Soudry, "Accelerated Sparse Neural Training", NeurIPS 2021.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from .common import compute_dtype

PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
"""The two kept columns of one row of a 2:4 pattern, in order."""
PATTERNS = tuple(
    ids for ids in itertools.product(range(6), repeat=4) if sorted(c for i in ids for c in PAIRS[i]) == [0, 0, 1, 1, 2, 2, 3, 3]
)
"""The 90 masks with 2 of 4 in every row and column, as four pair ids each, in lexicographic order."""

UNIT = 1 << 50
"""The integer that the largest finite magnitude of a tile maps to: sums are exact, and paths of 2 * 256 edges stay below REACHED."""
REACHED, FAR = 1 << 60, 1 << 61
CHUNK = 1 << 19
"""Elements processed at a time, to bound memory."""


def transposable_mask(w: Tensor, n: int, m: int) -> Tensor:
    """Mark exactly n elements in every row and column of every m x m tile of ``(..., rows, cols)``, with the largest total: max Σ M|w|.

    2:4: the score of each of the 90 ``PATTERNS`` is ((r0 + r1) + (r2 + r3)), r a row's two magnitudes added in the compute
    dtype; ties take the first. Other n:m: a maximum b-matching, exact up to rounding the magnitudes to 2^-50 of the tile's largest. A NaN
    counts as infinity; as many infinities as possible are kept.
    """
    rows, cols = w.shape[-2] // m, w.shape[-1] // m
    a = w.to(compute_dtype(w.dtype)).abs()
    a = torch.where(a.isnan(), float("inf"), a)
    tiled = a.unflatten(-1, (cols, m)).unflatten(-3, (rows, m)).movedim(-2, -3)
    tiles = tiled.reshape(-1, m, m) if w.numel() else a.new_zeros(0, m, m)
    out = torch.zeros(tiles.shape, dtype=torch.bool, device=w.device)
    solve = _best_of_90 if (n, m) == (2, 4) else _b_matching
    step = max(1, CHUNK // (m * m))
    for start in range(0, tiles.shape[0], step):
        out[start : start + step] = solve(tiles[start : start + step], n)
    return out.view(tiled.shape).movedim(-3, -2).reshape(w.shape)


def _best_of_90(a: Tensor, _n: int) -> Tensor:
    """Try the patterns in order; only a strictly better one replaces. a: ``(tiles, 4, 4)``."""
    pair_sums = torch.stack([a[..., j] + a[..., k] for j, k in PAIRS], dim=-1)
    r0, r1, r2, r3 = pair_sums.unbind(-2)
    best = torch.full_like(a[:, 0, 0], -1.0)
    choice = torch.zeros(a.shape[0], dtype=torch.int64, device=a.device)
    for number, (i, j, k, q) in enumerate(PATTERNS):
        score = (r0[:, i] + r1[:, j]) + (r2[:, k] + r3[:, q])
        better = score > best
        best = torch.where(better, score, best)
        choice.masked_fill_(better, number)
    masks = torch.tensor([[[column in PAIRS[pair] for column in range(4)] for pair in ids] for ids in PATTERNS], device=a.device)
    return masks[choice]


def _integers(a: Tensor, n: int) -> Tensor:
    """Magnitudes as int64, the largest of a tile at UNIT; an infinity outweighs the sum of all finite ones in its tile."""
    a = a.double()
    top = a.masked_fill(a.isinf(), 0.0).amax((1, 2), keepdim=True)
    a = torch.where(a.isinf(), float(n * a.shape[-1] + 1), a / torch.where(top == 0, 1.0, top))
    return (a / a.amax((1, 2), keepdim=True).clamp_min(1.0) * UNIT).round().long()


def _b_matching(a: Tensor, n: int) -> Tensor:
    """Successive shortest paths: every row starts with its n best elements, then full columns pass elements to short ones.

    The start is optimal for its column sums, and moving one element along a cheapest path keeps it optimal; once no column has more than n,
    the result is optimal. Integers make "cheapest" exact. a: ``(tiles, m, m)``.
    """
    value = _integers(a, n)
    chosen = torch.zeros(a.shape, dtype=torch.bool, device=a.device).scatter_(-1, value.topk(n, dim=-1).indices, True)
    active = (chosen.sum(1) > n).any(-1).nonzero().flatten()
    while active.numel():
        chosen[active] = _augment(value[active], chosen[active], n)
        active = active[(chosen[active].sum(1) > n).any(-1)]
    return chosen


def _augment(value: Tensor, kept: Tensor, n: int) -> Tensor:
    """Move one element of each tile from columns above n to one below, along the cheapest path (Bellman-Ford)."""
    load = kept.sum(1)
    give = torch.where(kept, value, FAR)  # leaving column j in row i costs its value
    take = torch.where(kept, FAR, -value)  # entering column k in row i gains its value
    col = torch.where(load > n, 0, FAR)
    row = torch.full_like(col, FAR)
    row_from, col_from = torch.full_like(col, -1), torch.full_like(col, -1)
    changed = True
    while changed:
        cost, source = (col.unsqueeze(1) + give).min(2)
        better = (cost < row) & (cost < REACHED)
        row, row_from = torch.where(better, cost, row), torch.where(better, source, row_from)
        cost, source = (row.unsqueeze(2) + take).min(1)
        better = (cost < col) & (cost < REACHED)
        col, col_from = torch.where(better, cost, col), torch.where(better, source, col_from)
        changed = bool(better.any())
    end = torch.where(load < n, col, FAR).argmin(-1)
    return _trace(kept.clone(), row_from, col_from, end)


def _trace(kept: Tensor, row_from: Tensor, col_from: Tensor, end: Tensor) -> Tensor:
    """Walk each tile's path back from column ``end`` to its start, flipping the elements on it."""
    tile = torch.arange(kept.shape[0], device=kept.device)
    while tile.numel():
        row = col_from[tile, end]
        tile, end, row = tile[row >= 0], end[row >= 0], row[row >= 0]
        kept[tile, row, end] = True
        end = row_from[tile, row]
        kept[tile, row, end] = False
    return kept
