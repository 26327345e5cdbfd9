"""Transposable masks against every pattern there is, and against a certificate of optimality where there are too many."""

import itertools
import math

import numpy as np
import pytest
import torch

from nmkernels.reference import transposable_mask
from python_tests.for_each import for_each
from python_tests.reference.conftest import DTYPES, edge


def every(n, m):
    """All 0/1 matrices with n in each row and column, rows in lexicographic order of their kept columns."""
    rows = list(itertools.combinations(range(m), n))
    found = []

    def extend(chosen, room):
        if len(chosen) == m:
            found.append([[float(c in row) for c in range(m)] for row in chosen])
            return
        for row in rows:
            if all(room[c] for c in row):
                extend([*chosen, row], [r - (c in row) for c, r in enumerate(room)])

    extend([], [n] * m)
    return torch.tensor(found, dtype=torch.float64)


def is_regular(mask, n, m):
    tiles = mask.unflatten(-1, (-1, m)).unflatten(-3, (-1, m))
    return bool((tiles.sum(-1) == n).all() and (tiles.sum(-3) == n).all())


def can_improve(a, mask):
    """Whether some cycle of exchanges raises the total: a negative cycle between columns, by Floyd and Warshall."""
    m = a.shape[0]
    loss = torch.full((m, m), math.inf, dtype=torch.float64)
    for i in range(m):
        step = a[i][:, None] - a[i][None, :]  # row i leaves column j for column k
        allowed = mask[i][:, None] & ~mask[i][None, :]
        loss = torch.minimum(loss, torch.where(allowed, step, math.inf))
    for k in range(m):
        loss = torch.minimum(loss, loss[:, k : k + 1] + loss[k : k + 1, :])
    return bool((loss.diagonal() < -1e-9 * a.max()).any())


@for_each("dtype", DTYPES)
def test_two_of_four_is_the_first_best_score(dtype):
    real = np.float64 if dtype == torch.float64 else np.float32
    few = torch.randint(-2, 3, (40, 4)).to(dtype)  # ties everywhere
    close = 1 + torch.randint(8, (80, 4)) * torch.finfo(dtype).eps  # totals that differ by their rounding only
    w = torch.cat([edge(40, 4, dtype), few, close.to(dtype), torch.randn(40, 4).to(dtype), torch.zeros(4, 4, dtype=dtype)])
    got = transposable_mask(w, 2, 4)
    a = w.abs().to(torch.float64).numpy().astype(real)
    a[np.isnan(a)] = np.inf
    everything = every(2, 4).bool()
    for tile, chosen in zip(a.reshape(-1, 4, 4), got.view(-1, 4, 4), strict=True):
        best, winner = real(-1), None
        for pattern in everything:
            with np.errstate(over="ignore"):
                r = [row[keep][0] + row[keep][1] for row, keep in zip(tile, pattern.numpy(), strict=True)]
                score = (r[0] + r[1]) + (r[2] + r[3])
            if score > best:
                best, winner = score, pattern
        assert torch.equal(chosen, winner)


@for_each("n, m", [(1, 1), (1, 2), (2, 2), (1, 3), (2, 3), (1, 4), (2, 4), (3, 4), (4, 4), (1, 5), (2, 5), (4, 5)])
@for_each("kind", ["normal", "ties", "huge"])
def test_the_total_is_that_of_the_best_of_all(n, m, kind):
    generator = torch.Generator().manual_seed(m)
    w = torch.randn(20 * m, m, generator=generator, dtype=torch.float64)
    if kind == "ties":
        w = w.round()
    elif kind == "huge":
        w = w * 10.0 ** torch.randint(-30, 30, w.shape, generator=generator)
    got = transposable_mask(w, n, m)
    assert is_regular(got, n, m)
    a = w.abs().view(20, m, m)
    best = torch.einsum("tij,pij->tp", a, every(n, m)).amax(1)
    total = (a * got.view(20, m, m)).sum((1, 2))
    assert (total >= best * (1 - 1e-12)).all()


@pytest.mark.slow
@for_each("n, m", [(2, 8), (4, 8), (7, 8), (3, 6), (1, 16), (8, 16), (4, 32), (16, 32), (20, 64)])
@for_each("kind", ["normal", "ties", "ranked"])
def test_no_cycle_of_exchanges_improves(n, m, kind):
    generator = torch.Generator().manual_seed(n)
    w = torch.randn(3 * m, m, generator=generator, dtype=torch.float64)
    if kind == "ties":
        w = w.mul(2).round()
    elif kind == "ranked":  # every row wants the same columns: the longest way from the start
        w = torch.rand(3 * m, 1, generator=generator).double() * torch.linspace(1, 2, m).double()
    got = transposable_mask(w, n, m)
    assert is_regular(got, n, m)
    for tile, mask in zip(w.abs().view(3, m, m), got.view(3, m, m), strict=True):
        assert not can_improve(tile, mask)


def test_infinities_come_first_then_finite_numbers():
    w = torch.tensor([[math.inf, math.nan, 1.0], [5.0, 1.0, 1.0], [1.0, 2.0, 7.0]])
    assert transposable_mask(w, 1, 3).tolist() == [[False, True, False], [True, False, False], [False, False, True]]
    one = torch.tensor([[math.inf, 5.0], [5.0, 0.0]])  # one infinity outweighs any finite numbers
    assert transposable_mask(one, 1, 2).tolist() == [[True, False], [False, True]]
    assert is_regular(transposable_mask(torch.full((8, 8), math.nan), 3, 8), 3, 8)
    assert is_regular(transposable_mask(torch.zeros(8, 8), 3, 8), 3, 8)


@for_each("n, m", [(2, 4), (1, 4), (2, 8)])
def test_tiles_are_alone_in_batches_and_chunks(n, m, monkeypatch):
    w = torch.randn(2, 3, 24, 32)
    got = transposable_mask(w, n, m)
    assert got.shape == w.shape and got.is_contiguous() and is_regular(got, n, m)
    tile = w[1, 2, m : 2 * m, 2 * m : 3 * m]
    assert torch.equal(got[1, 2, m : 2 * m, 2 * m : 3 * m], transposable_mask(tile.contiguous(), n, m))
    monkeypatch.setattr("nmkernels.reference.transposable.CHUNK", 3 * m * m)
    assert torch.equal(transposable_mask(w, n, m), got)
    for shape in ((0, m), (m, 0), (0, m, m)):
        assert transposable_mask(torch.empty(shape), n, m).shape == shape
