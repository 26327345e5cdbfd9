"""The maths of one MVUE group: bit for bit against scalars, and its exact mean and variance over all 2^24 uniforms."""

import itertools
import math

import numpy as np
import torch

from nmkernels.reference import group_mvue
from nmkernels.testing import equal_bits
from python_tests.each import each
from python_tests.reference.conftest import DTYPES

ONE = 1 << 24


def tree(x):
    x = list(x)
    while len(x) & (len(x) - 1):
        x.append(type(x[0])(0))
    while len(x) > 1:
        x = [x[i] + x[i + 1] for i in range(0, len(x), 2)]
    return x[0]


def design(g, n):
    """One ordinary group in its own scalar type: kept as they are, ends C of the others' intervals, the value they get."""
    a, m, real = [abs(x) for x in g], len(g), type(g[0])
    sure = set()
    while True:
        s = tree([real(0) if i in sure else a[i] for i in range(m)])
        new = {i for i in range(m) if i not in sure and a[i] != 0 and a[i] * real(n - len(sure)) >= s}
        if not new or len(sure) == n:
            break
        sure |= new
    r, ends, running = n - len(sure), [], 0
    live = [i for i in range(m) if i not in sure and a[i] != 0 and r > 0]
    for i in range(m):
        if i in live:
            running += math.floor(a[i] * real(r) / s * real(ONE))
        ends.append(r * ONE if not live or i >= live[-1] else min(running, r * ONE))
    return sure, ends, s / real(r) if r else real(0)


def scalar(g, u, n):
    """The estimate of one group of finite sum, as the words of the design say it."""
    if sum(x != 0 for x in g) <= n:
        return [x if x != 0 else 0.0 for x in g]
    sure, ends, value = design(g, n)
    starts = [0, *ends[:-1]]
    taken = [(e + ONE - u) >> 24 > (b + ONE - u) >> 24 for b, e in zip(starts, ends, strict=True)]
    return [g[i] if i in sure else np.copysign(value, g[i]) if taken[i] else 0.0 for i in range(len(g))]


def distribution(g, n):
    """Every outcome of a 1-D group and its probability: the outcome changes only where u passes an end modulo 2^24."""
    ends = design([x.numpy()[()] for x in g], n)[1]
    cuts = sorted({0, ONE} | {e % ONE + 1 for e in ends})
    low = group_mvue(g.expand(len(cuts) - 1, -1), torch.tensor(cuts[:-1]), n)
    high = group_mvue(g.expand(len(cuts) - 1, -1), torch.tensor(cuts[1:]) - 1, n)
    assert torch.equal(low, high), "the outcome changed inside an interval"
    return low.double(), torch.tensor([(b - a) / ONE for a, b in itertools.pairwise(cuts)], dtype=torch.float64)


def water_filling(a, n):
    """p_i = min(1, c a_i) with sum n, in float64."""
    sure = torch.zeros_like(a, dtype=torch.bool)
    while True:
        p = torch.where(sure, 1.0, (n - sure.sum()) * a / a[~sure].sum())
        if not (p[~sure] >= 1).any():
            return p
        sure = sure | (p >= 1)


def random_group(rng, m, kind):
    g = rng.standard_normal(m)
    if kind == "wide":
        g = g * np.exp(4 * rng.standard_normal(m))
    elif kind == "ties":
        g = np.round(2 * g)
    elif kind == "huge":
        g = g * 10.0 ** rng.integers(-30, 30, m)
    return g


@each("n, m", [(1, 1), (1, 2), (2, 3), (1, 4), (2, 4), (3, 4), (4, 4), (2, 8), (3, 8), (7, 8), (4, 17), (6, 32)])
@each("real", [np.float32, np.float64])
def test_bits_equal_a_scalar_loop(n, m, real):
    rng = np.random.default_rng(n * m)
    groups = [random_group(rng, m, kind).astype(real) for kind in ("normal", "wide", "ties", "huge") for _ in range(20)]
    u = [int(x) for x in rng.integers(0, ONE, len(groups))]
    u[:8] = [0, ONE - 1, 1, ONE // 2, 0, ONE - 1, 1, ONE // 2]
    want = np.array([scalar(list(g), x, n) for g, x in zip(groups, u, strict=True)], dtype=real)
    got = group_mvue(torch.tensor(np.array(groups)), torch.tensor(u), n)
    assert equal_bits(got, torch.from_numpy(want))
    assert torch.equal((got != 0).sum(1), (got.new_tensor(np.array(groups)) != 0).sum(1).clamp_max(n))


@each("n, m", [(1, 2), (1, 4), (2, 4), (3, 4), (2, 8), (3, 8), (4, 16), (3, 5)])
@each("kind", ["normal", "wide", "ties", "huge"])
def test_unbiased_optimal_and_of_fixed_size_over_all_uniforms(n, m, kind):
    rng = np.random.default_rng(m)
    for _ in range(10):
        g = torch.from_numpy(random_group(rng, m, kind))
        if (g != 0).sum() <= n:
            continue
        outcome, chance = distribution(g, n)
        top, p = g.abs().max(), water_filling(g.abs(), n)
        assert ((chance @ outcome) - g).abs().max() <= m * top * 2**-23
        assert ((chance @ (outcome != 0).double()) - p).abs().max() <= m * 2**-23
        best = (g.square() / p)[p != 0].sum() - g.square().sum()
        mse = chance @ (outcome - g).square().sum(1)
        assert abs(mse - best) <= m * m * top.square() * 2**-22
        sizes = (outcome != 0).sum(1)
        assert (sizes <= n).all() and chance[sizes < n].sum() <= m / ONE


@each("dtype", DTYPES)
def test_groups_of_at_most_n_non_zeros_are_copied(dtype):
    info = torch.finfo(dtype)
    g = torch.tensor([[0, -0.0, 3, -info.smallest_normal * info.eps], [0] * 4, [-0.0] * 4, [0, 0, info.tiny, 0]], dtype=torch.float64).to(
        dtype
    )
    for u in (0, 12345, ONE - 1):
        assert equal_bits(group_mvue(g, torch.full((4,), u), 2), torch.where(g == 0, torch.zeros_like(g), g))


@each("method", ["exact", "approx"])
def test_what_is_not_finite_gives_nan_at_the_mask(method):
    inf, nan, big = math.inf, math.nan, 3e38
    g = torch.tensor([[1, nan, 3, 2], [inf, 1, 1, 1], [inf, -inf, 0, 0], [0, 0, 0, nan], [big, -big, 1, 2], [1, 2, 3, 4]])
    x = group_mvue(g, torch.zeros(6, 2 if method == "approx" else 1, dtype=torch.int64).squeeze(1), 2, method)
    where = [[0, 1, 1, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert x.isnan().int().tolist() == where
    rest = x[:5][~x[:5].isnan()]
    assert (rest == 0).all() and not rest.signbit().any()


@each("low", [torch.float16, torch.bfloat16])
@each("method", ["exact", "approx"])
def test_low_precision_is_float32_rounded_once(low, method):
    g = (torch.randn(500, 4) * torch.randn(500, 4).exp()).to(low)
    u = torch.randint(ONE, (500, 2))
    u = u if method == "approx" else u[:, 0]
    assert equal_bits(group_mvue(g, u, 2, method), group_mvue(g.float(), u, 2, method).to(low))
