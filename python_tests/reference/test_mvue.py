"""mvue and mvue_compress on tensors, and the exact distribution of the approximate method."""

import itertools
import math
import sys

import numpy as np
import pytest
import torch

from nmkernels.reference import compress, decompress, group_mvue, mvue, mvue_compress, word_pairs, words
from nmkernels.testing import equal_bits
from python_tests.for_each import for_each
from python_tests.reference.conftest import DTYPES, edge

ONE = 1 << 24
SEED = torch.tensor([11, 5])


def tree4(x):
    return (x[0] + x[1]) + (x[2] + x[3])


def ends(p, live):
    """Ends of the intervals of a draw in 24-bit integers; the last live element takes what is left."""
    last, running, out = max(i for i in range(4) if live[i]), 0, []
    for i in range(4):
        running += math.floor(p[i] * type(p[i])(ONE))
        out.append(ONE if i >= last else min(running, ONE))
    return out


def approx_design(g):
    """First draw, second draw given the first, and kept probabilities of a group of 2:4, in its scalar type."""
    a, zero = [abs(x) for x in g], type(g[0])(0)
    t = [x / tree4(a) for x in a]
    rest = [tree4([zero if i == j else a[i] for i in range(4)]) for j in range(4)]
    p = []
    for i in range(4):
        total = t[i]
        for j in range(4):
            if j != i:
                total = total + (a[i] / rest[j]) * t[j]
        p.append(max(total, type(total)(2.0**-24)))
    second = []
    for i in range(4):
        b = [zero if k == i else a[k] for k in range(4)]
        second.append(ends([x / rest[i] for x in b], [x != 0 for x in b]))
    return ends(t, [x != 0 for x in a]), second, p


def approx_scalar(g, u):
    first, second, p = approx_design(g)
    i = next(k for k in range(4) if u[0] < first[k])
    j = next(k for k in range(4) if u[1] < second[i][k])
    return [np.copysign(abs(g[k]) / p[k], g[k]) if k in (i, j) else 0.0 for k in range(4)]


@for_each("real", [np.float32, np.float64])
def test_approx_equals_a_scalar_loop(real):
    rng = np.random.default_rng(0)
    groups = (rng.standard_normal((200, 4)) * np.exp(3 * rng.standard_normal((200, 4)))).astype(real)
    groups[:40] = rng.integers(1, 3, (40, 4))
    groups[40:80, 2] = 0
    groups[80:82] = [1, 1, 1, 1e-30]  # the last takes the remainder: drawn although its probability is nearly 0
    u = rng.integers(0, ONE, (200, 2))
    u[:4] = [[0, 0], [0, ONE - 1], [ONE - 1, 0], [ONE - 1, ONE - 1]]
    u[80:82] = [[ONE - 1, 0], [0, ONE - 1]]
    want = np.array([approx_scalar(list(g), x) for g, x in zip(groups, u.tolist(), strict=True)], dtype=real)
    assert equal_bits(group_mvue(torch.from_numpy(groups), torch.from_numpy(u) << 8, 2, "approx"), torch.from_numpy(want))


@for_each("a", [(1, 2, 3, 4), (0, 1, 1, 1), (0.1, 0.2, 0.3, 2)])
def test_approx_is_unbiased_over_all_pairs_of_uniforms(a):
    g = torch.tensor(a, dtype=torch.float64) * torch.tensor([1, -1, 1, -1])
    first, second, _ = approx_design([x.numpy()[()] for x in g])
    us, chance = [], []
    for i, (low, high) in enumerate(itertools.pairwise([0, *first])):
        for start, end in itertools.pairwise([0, *second[i]]):
            if high > low and end > start:
                us.append((low, start))
                chance.append((high - low) / ONE * (end - start) / ONE)
    outcome, chance = group_mvue(g.expand(len(us), 4), torch.tensor(us) << 8, 2, "approx"), torch.tensor(chance, dtype=torch.float64)
    assert chance.sum().item() == pytest.approx(1, abs=1e-12)
    assert ((outcome != 0).sum(1) == 2).all()
    assert torch.allclose(chance @ outcome, g, atol=1e-6)


@for_each("n, m, method", [(2, 4, "exact"), (2, 4, "approx"), (1, 2, "exact"), (3, 8, "exact"), (2, 3, "approx")])
@for_each("shape, dim", [((6, 48), -1), ((6, 48), 1), ((48,), 0), ((2, 3, 48), 2), ((48, 5), 0), ((2, 48, 3), 1)])
@for_each("dtype", DTYPES)
def test_each_group_draws_its_own_word_in_row_major_order(n, m, method, shape, dim, dtype):
    g = torch.randn(shape, generator=torch.Generator().manual_seed(m)).to(dtype)
    groups = g.movedim(dim, -1).reshape(-1, m)
    random = (words if method == "exact" else word_pairs)(SEED, len(groups))
    want = group_mvue(groups, random, n, method).view(g.movedim(dim, -1).shape).movedim(-1, dim)
    got = mvue(g, n, m, dim, SEED, method)
    assert equal_bits(got, want) and got.is_contiguous()


@for_each("tokens", [1, 3, 4, 5, 39])
@for_each("dtype", DTYPES)
def test_the_tail_of_other_dimensions_is_padded_with_zeros(tokens, dtype):
    g = torch.randn(tokens, 6).to(dtype)
    padded = torch.nn.functional.pad(g, (0, 0, 0, -tokens % 4))
    assert equal_bits(mvue(g, 2, 4, 0, SEED), mvue(padded, 2, 4, 0, SEED)[:tokens])
    values, indices = mvue_compress(g, 2, 4, 0, SEED)
    assert values.shape == (6, (tokens + 3) // 4 * 2) and indices.shape == (6, ((tokens + 3) // 4 + 1) // 2)
    assert equal_bits(decompress(values, indices, 2, 4, tokens), mvue(g, 2, 4, 0, SEED).T)


@for_each("method", ["exact", "approx"])
@for_each("dim", [0, 1])
@for_each("dtype", DTYPES)
def test_packed_is_the_compressed_dense_result(method, dim, dtype):
    g = torch.cat([edge(20, 32, dtype), torch.randn(20, 32).to(dtype)])
    dense = mvue(g, 2, 4, dim, SEED, method).movedim(dim, -1)
    values, indices = mvue_compress(g, 2, 4, dim, SEED, method)
    want = compress(dense, 2, 4, dense != 0)
    assert equal_bits(values, want[0]) and torch.equal(indices, want[1])


def test_replay_offset_seed_and_chunks(monkeypatch):
    g = torch.randn(32, 64)
    x = mvue(g, 2, 4, -1, SEED)
    assert equal_bits(mvue(g, 2, 4, -1, SEED.clone()), x)
    assert not torch.equal(mvue(g, 2, 4, -1, SEED + torch.tensor([0, 1])), x)
    assert not torch.equal(mvue(g, 2, 4, -1, SEED + torch.tensor([1, 0])), x)
    approx = mvue(g, 2, 4, -1, SEED, "approx")
    monkeypatch.setattr(sys.modules["nmkernels.reference.mvue"], "CHUNK", 27)  # 6 groups: starts inside blocks of four words
    assert equal_bits(mvue(g, 2, 4, -1, SEED), x) and equal_bits(mvue(g, 2, 4, -1, SEED, "approx"), approx)
