"""The soft threshold against a loop in plain Python, and the facts of the S-STE paper's projection."""

import math

import numpy as np
import torch

from nmkernels.reference import soft_threshold, soft_threshold_scale
from nmkernels.testing import equal_bits
from python_tests.for_each import for_each
from python_tests.reference.conftest import DTYPES, edge

PATTERNS = [(1, 1), (1, 2), (2, 4), (3, 4), (4, 4), (1, 4), (2, 8), (3, 16), (100, 256)]


def looped(row, n, m, real):
    """One row, in the compute type ``real``, from the equation."""
    out = []
    for start in range(0, len(row), m):
        group = [real(x) for x in row[start : start + m]]
        ranked = sorted((abs(x) for x in group), key=lambda a: (not math.isnan(a), 0.0 if math.isnan(a) else -a))
        t = real(0.0) if n == m else ranked[n]
        for x in group:
            with np.errstate(all="ignore"):
                d = abs(x) - t
            out.append(float(np.copysign(d, x)) if math.isnan(d) or d > 0 else 0.0)
    return out


@for_each("n, m", PATTERNS)
@for_each("dtype", DTYPES)
def test_equals_a_loop(n, m, dtype):
    w = edge(16, 2 * m, dtype, seed=n * m)
    real = np.float64 if dtype == torch.float64 else np.float32
    want = torch.tensor([looped(row, n, m, real) for row in w.tolist()], dtype=torch.float64).to(dtype)
    assert equal_bits(soft_threshold(w, n, m), want)


def test_scale_is_the_least_squares_one_and_zero_for_nothing():
    w = torch.randn(64, 64, dtype=torch.float64)
    s, beta = soft_threshold(w, 2, 4), soft_threshold_scale(w, 2, 4)
    assert ((w - beta * s) * s).sum().abs() < 1e-10 * (s * s).sum()
    assert soft_threshold_scale(torch.zeros(4), 2, 4).item() == soft_threshold_scale(torch.empty(0, 8), 2, 4).item() == 0.0
    assert soft_threshold_scale(torch.ones(4), 2, 4).item() == 0.0
    assert soft_threshold_scale(torch.tensor([math.nan, 1.0, 2.0, 3.0]), 2, 4).isnan()


@for_each("digits", [8, 11])
def test_a_difference_rounded_to_float32_first_is_the_same(digits):
    """What the CUDA kernels rely on, which subtract two 16-bit numbers at once (threshold_pairs.h): all exponents, many significands."""
    least = 1 << (digits - 1)
    rng = np.random.default_rng(0)
    some = np.unique(np.concatenate([least + np.arange(16), 2 * least - 1 - np.arange(16), rng.integers(least, 2 * least, 96)]))
    apart = 2.0 ** np.arange(40)
    exact = np.subtract.outer(np.multiply.outer(some.astype(np.float64), apart).ravel(), some.astype(np.float64))

    def rounded(x):
        mantissa, exponent = np.frexp(x.astype(np.float64))
        return np.ldexp(np.rint(np.ldexp(mantissa, digits)), exponent - digits)

    assert (rounded(exact) == rounded(exact.astype(np.float32))).all()
    short = np.ldexp(np.rint(np.ldexp(np.frexp(exact)[0], digits + 3)), np.frexp(exact)[1] - digits - 3)
    assert (rounded(exact) != rounded(short)).any(), "three more digits would not do"
