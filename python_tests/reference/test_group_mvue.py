"""The maths of one MVUE group: bit for bit against scalars, and its exact mean and variance over all random numbers."""

import itertools
import math

import numpy as np
import pytest
import torch

from nmkernels.reference import group_mvue, has_level_rule
from nmkernels.testing import equal_bits
from python_tests.for_each import for_each
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


def scalar(g, word, n):
    """The estimate of one group of finite sum, as the words of the design say it."""
    if sum(x != 0 for x in g) <= n:
        return [x if x != 0 else 0.0 for x in g]
    if has_level_rule(n, len(g)):
        return by_level(g, word, n)
    u, (sure, ends, value) = word >> 8, design(g, n)
    starts = [0, *ends[:-1]]
    taken = [(e + ONE - u) >> 24 > (b + ONE - u) >> 24 for b, e in zip(starts, ends, strict=True)]
    return [g[i] if i in sure else np.copysign(value, g[i]) if taken[i] else 0.0 for i in range(len(g))]


def by_level(g, word, n):
    """The rule of ``has_level_rule`` for one group of more than n non-zeros, its level within the ordinary range."""
    a, m, real = [abs(x) for x in g], len(g), type(g[0])
    fraction = 23 if real == np.float32 else 52
    level = tree(a)
    if n == 2:
        level = min(level * real(0.5), min(tree([real(0) if i == j else a[i] for i in range(m)]) for j in range(m)))
    scale = real(1)
    if level < np.finfo(real).tiny or level >= real(2) ** (np.finfo(real).maxexp - 4):
        wide = 64 if real == np.float32 else 512
        scale = real(2) ** (wide if level < 1 else -wide)
    exponent = math.frexp(float(level) * float(scale))[1] - 1
    quantum = real(2.0 ** (exponent - fraction + 3))
    high = real(math.floor(level * scale / quantum)) * quantum
    base, bits = real(2.0 ** (exponent + 3)), 15 if m == 16 else 16
    second = base + real(1 + ((word >> (32 - bits)) + 0.5) / 2**bits) * high
    first, c, kept = second - high, [base], set()
    for x in a:
        c.append(c[-1] + min(x * scale, high))
    for t in (first, second)[:n]:
        kept.add(next((i for i in range(m) if t < c[i + 1]), m - 1))
    return [np.copysign(max(a[i], high / scale), g[i]) if i in kept else 0.0 for i in range(m)]


def distribution(g, n):
    """Every outcome of a 1-D group and its probability."""
    if has_level_rule(n, len(g)):
        bits = 15 if len(g) == 16 else 16
        words = torch.arange(1 << bits) << (32 - bits)
        return group_mvue(g.expand(len(words), -1), words, n).double(), torch.full((len(words),), 2.0**-bits, dtype=torch.float64)
    # the outcome changes only where u passes an end modulo 2^24
    ends = design([x.numpy()[()] for x in g], n)[1]
    cuts = sorted({0, ONE} | {e % ONE + 1 for e in ends})
    low = group_mvue(g.expand(len(cuts) - 1, -1), torch.tensor(cuts[:-1]) << 8, n)
    high = group_mvue(g.expand(len(cuts) - 1, -1), (torch.tensor(cuts[1:]) << 8) - 1, n)
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


@for_each(
    "n, m", [(1, 1), (1, 2), (2, 3), (1, 4), (2, 4), (3, 4), (4, 4), (1, 8), (2, 8), (3, 8), (7, 8), (1, 16), (2, 16), (4, 17), (6, 32)]
)
@for_each("real", [np.float32, np.float64])
def test_bits_equal_a_scalar_loop(n, m, real):
    rng = np.random.default_rng(n * m)
    groups = [random_group(rng, m, kind).astype(real) for kind in ("normal", "wide", "ties", "huge") for _ in range(20)]
    # levels without a normal number, and such that no sums are left above them
    groups += [groups[i] * real(2.0**e) for e in ((-149, -130, -126, 122, 123) if real == np.float32 else (-1070, 1019)) for i in range(3)]
    words = [int(x) for x in rng.integers(0, 1 << 32, len(groups))]
    words[:8] = [0, 2**32 - 1, 1 << 8, 1 << 31, 0, 2**32 - 1, 1 << 8, 1 << 31]
    with np.errstate(over="ignore"):
        finite = [i for i, g in enumerate(groups) if np.isfinite(tree([abs(x) for x in g]))]
        groups, words = [groups[i] for i in finite], [words[i] for i in finite]
        want = np.array([scalar(list(g), x, n) for g, x in zip(groups, words, strict=True)], dtype=real)
    got = group_mvue(torch.tensor(np.array(groups)), torch.tensor(words), n)
    assert equal_bits(got, torch.from_numpy(want))
    assert torch.equal((got != 0).sum(1), (got.new_tensor(np.array(groups)) != 0).sum(1).clamp_max(n))


@for_each("n, m", [(3, 4), (3, 8), (4, 16), (3, 5)])
@for_each("kind", ["normal", "wide", "ties", "huge"])
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


@for_each("n, m", [(1, 2), (2, 4), (1, 8), (2, 16)])
def test_level_rule_next_to_breakpoints(n, m):
    """The words around the one at which the kept element changes: bit for bit against a scalar loop."""
    rng, bits = np.random.default_rng(m), 15 if m == 16 else 16
    for _ in range(20):
        g = rng.uniform(1, 2, m).astype(np.float32)
        at = int(g[0] / (g.sum() / n) * 2**bits)
        words = [k << (32 - bits) for k in range(at - 2, at + 3)]
        want = torch.from_numpy(np.array([scalar(list(g), word, n) for word in words], dtype=np.float32))
        assert len(want.unique(dim=0)) > 1
        assert equal_bits(group_mvue(torch.from_numpy(g).expand(5, m), torch.tensor(words), n), want)


LEVEL = [(1, 2), (1, 4), (2, 4), (1, 8), (2, 8), (1, 16), (2, 16)]


def check_all_words(n, m, g):
    """One group, all numbers that decide what is kept: n elements, no zero, all that reach the level; mean and variance."""
    outcome, chance = distribution(g, n)
    kept, a = outcome != 0, g.double().abs()
    level = outcome.abs()[kept].min()
    assert (kept.sum(1) == n).all() and not kept[:, g == 0].any() and kept[:, a >= level].all()
    assert torch.equal(outcome.abs().maximum(a), torch.where(a >= level, a, torch.where(kept, level, a)))
    quantum = 2.0**-20 if g.dtype == torch.float32 else 2.0**-49
    bound = ((2.0**-15 if m == 16 else 2.0**-16) + (m / 2 + 3) * quantum) * level
    # float64 sums of as many numbers lose something too
    assert (((chance @ outcome) - g).abs() <= bound + 1e-11 * a).all()
    p = water_filling(a, n)
    best = (a.square() / p)[p != 0].sum() - a.square().sum()
    assert (chance @ (outcome - g).square().sum(1) - best).abs() <= m * m * a.max() * (bound + 1e-11 * a.max())


@for_each("n, m, kind", [(1, 2, "normal"), (2, 4, "wide"), (2, 4, "normal"), (1, 8, "ties"), (2, 8, "huge")])
def test_level_rule_over_all_words(n, m, kind):
    check_all_words(n, m, torch.from_numpy(random_group(np.random.default_rng(n + m), m, kind).astype(np.float32)))


@pytest.mark.slow
@pytest.mark.parametrize(("n", "m"), LEVEL)
@for_each("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_level_rule_over_all_words_of_many_groups(n, m, dtype):
    rng = np.random.default_rng(m)
    for kind in ("normal", "wide", "ties", "huge", "zeros", "dominant", "powers", "nearly"):
        for _ in range(3):
            x = random_group(rng, m, kind)
            if kind == "zeros":
                x = x * (rng.random(m) < 0.6)
            elif kind == "dominant":
                x[rng.integers(m)] *= 1e4
            elif kind == "powers":
                x = np.sign(x) * 2.0 ** rng.integers(-6, 6, m)
            elif kind == "nearly":  # the largest is all but the sum of the others
                x[0] = np.abs(x[1:]).sum() * (1 + rng.integers(-3, 4) * 2.0**-23)
            g = torch.from_numpy(x).to(dtype)
            g = g if dtype == torch.float64 else g.float()
            if (g != 0).sum() > n and g.abs().sum() < 2.0**100:
                check_all_words(n, m, g)


@for_each("low, bits", [(torch.bfloat16, 16), (torch.float16, 13)])
def test_the_level_is_rounded_at_random(low, bits):
    """Every lower half of a word, above and below the normal range: two neighbours of the level, whose mean is the level."""
    info, words = torch.finfo(low), torch.arange(1 << bits) | 0x8000 << 16
    least = info.smallest_normal * info.eps
    for values in (
        [3, 5, 7, 9],
        [1 + info.eps, 1, 1.5, 1.75],
        [3 * least, 5 * least, 7 * least, 2 * least],
        [k * least for k in (30, 50, 71, 20)],
    ):
        g = torch.tensor(values).to(low)
        assert torch.equal(g.float(), torch.tensor(values)), "not numbers of this type"
        exact = group_mvue(g.float().unsqueeze(0), words[:1], 2)[0]
        outcome = group_mvue(g.expand(len(words), 4), words, 2).double()
        rises = exact != g.float()
        assert torch.equal(outcome.mean(0), exact.double())
        assert all(len(column.unique()) <= 2 for column in outcome[:, rises & (exact != 0)].T)
        nearest = exact.to(low)
        near = torch.stack(
            [nearest, torch.nextafter(nearest, torch.full_like(g, -math.inf)), torch.nextafter(nearest, torch.full_like(g, math.inf))]
        )
        assert (outcome.unsqueeze(0) == near.double().unsqueeze(1)).any(0).all()


def test_a_level_beyond_float16_is_infinite():
    g = torch.tensor([60000, 60000, 60000, -60000], dtype=torch.float16)
    x = group_mvue(g.unsqueeze(0), torch.tensor([7]), 2)
    assert x.isinf().sum() == 2 and (x[x != 0].sign() == g[(x != 0)[0]].sign()).all()


@for_each("dtype", DTYPES)
def test_groups_of_at_most_n_non_zeros_are_copied(dtype):
    info = torch.finfo(dtype)
    g = torch.tensor([[0, -0.0, 3, -info.smallest_normal * info.eps], [0] * 4, [-0.0] * 4, [0, 0, info.tiny, 0]], dtype=torch.float64).to(
        dtype
    )
    for u in (0, 12345, ONE - 1):
        assert equal_bits(group_mvue(g, torch.full((4,), u << 8), 2), torch.where(g == 0, torch.zeros_like(g), g))


@for_each("method", ["exact", "approx"])
def test_what_is_not_finite_gives_nan_at_the_mask(method):
    inf, nan, big = math.inf, math.nan, 3e38
    g = torch.tensor([[1, nan, 3, 2], [inf, 1, 1, 1], [inf, -inf, 0, 0], [0, 0, 0, nan], [big, -big, 1, 2], [1, 2, 3, 4]])
    x = group_mvue(g, torch.zeros(6, 2 if method == "approx" else 1, dtype=torch.int64).squeeze(1), 2, method)
    where = [[0, 1, 1, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert x.isnan().int().tolist() == where
    rest = x[:5][~x[:5].isnan()]
    assert (rest == 0).all() and not rest.signbit().any()


@for_each("low", [torch.float16, torch.bfloat16])
@for_each("method", ["exact", "approx"])
def test_low_precision_is_float32_rounded_once(low, method):
    m = 4 if method == "approx" else 5
    g = (torch.randn(500, m) * torch.randn(500, m).exp()).to(low)
    words = torch.randint(1 << 32, (500, 2))
    words = words if method == "approx" else words[:, 0]
    assert equal_bits(group_mvue(g, words, 2, method), group_mvue(g.float(), words, 2, method).to(low))
