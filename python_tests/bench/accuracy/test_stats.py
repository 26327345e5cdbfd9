"""Intervals and equivalence tests against known values, Holm's textbook example, pairing by seed, and the words."""

from __future__ import annotations

import math

import pytest

from bench.accuracy.stats import Estimate, combined, estimate, holm, verdict

# Student's own data: extra hours of sleep of ten patients, drug 2 less drug 1 (Biometrika 6, 1908)
SLEEP = (1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4)


def test_students_sleep_data():
    found = estimate(SLEEP)
    assert found.n == 10 and found.mean == pytest.approx(1.58)
    assert found.mean - found.half == pytest.approx(0.7001, abs=1e-4)
    assert found.mean + found.half == pytest.approx(2.4599, abs=1e-4)
    assert found.p == pytest.approx(0.002833, abs=1e-6)
    assert found.shown(2, sign=True) == "+1.58 ± 0.88"


def test_few_and_lost_values():
    none, two, lost = estimate([]), estimate([2.0, 3.0]), estimate([1.0, math.nan, 3.0, math.inf, 2.0])
    assert none.n == 0 and none.shown() == "–" and math.isnan(none.p) and math.isnan(none.half)
    assert two.shown() == "–", "fewer than three seeds are not shown"
    assert (lost.mean, lost.n, lost.lost) == (2.0, 3, 2) and lost.shown(1).endswith("(2 diverged)")
    assert estimate([1.0, 1.0]).p == 0.0 and estimate([0.0, 0.0]).p == 1.0
    assert Estimate(-1e-5, 0.001, 5).shown(2, sign=True) == "+0.00 ± 0.00"


def test_pairs_are_of_the_seeds_that_all_have():
    ours, theirs = {0: 1.0, 1: 2.0, 2: math.nan, 4: 9.0}, {0: 0.5, 1: 1.0, 2: 1.0, 3: 7.0}
    pairs = combined([(1, ours), (-1, theirs)])
    assert (pairs.mean, pairs.n, pairs.lost) == (0.75, 2, 1), "a diverged run is counted"
    assert combined([]).n == 0


def test_level_is_the_equivalence_test():
    values = [0.004, -0.006, 0.002, 0.001, -0.003]
    scipy = pytest.importorskip("scipy.stats")
    for margin in (0.003, 0.004, 0.005, 0.01):
        p = max(
            scipy.ttest_1samp(values, -margin, alternative="greater").pvalue, scipy.ttest_1samp(values, margin, alternative="less").pvalue
        )
        assert estimate(values).within(margin) == (p < 0.05)
    assert not estimate([0.0]).within(1.0) and not estimate([*values, math.nan]).within(0.01)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.001, -0.001, 0.002, 0.0, -0.002], "level"),
        ([0.011, 0.012, 0.011, 0.012, 0.011], "level"),  # surely different, and surely too little to matter
        ([0.1, 0.12, 0.11, 0.1, 0.12], "behind"),
        ([-0.1, -0.12, -0.11, -0.1, -0.12], "ahead"),
        ([0.1, -0.2, 0.3, -0.1, 0.0], "not known"),
        ([0.1, 0.12, 0.11, 0.1], "not known"),  # too few
        ([-0.1, -0.12, -0.11, -0.1, -0.12, math.inf], "not known"),  # one diverged
    ],
)
def test_words(values, said):
    assert verdict(estimate(values), 0.02) == said


def test_holm_steps_down():
    # Holm (1979): the least p is multiplied by m, the next by m − 1, and none may fall below the one before
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    few = holm([0.01, math.nan, math.nan, math.nan])
    assert few[0] == 0.04 and all(map(math.isnan, few[1:])), "missing ones count in the family"
