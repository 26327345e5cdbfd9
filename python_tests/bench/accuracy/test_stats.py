"""Intervals against known values, Holm's textbook example, pairing by seed, and no extrapolation."""

from __future__ import annotations

import math

import pytest

from bench.accuracy.stats import Estimate, combined, estimate, holm, interpolate

# Student's own data: extra hours of sleep of ten patients, drug 2 less drug 1 (Biometrika 6, 1908)
SLEEP = (1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4)


def test_students_sleep_data():
    found = estimate(SLEEP)
    assert found.n == 10 and found.mean == pytest.approx(1.58)
    assert found.mean - found.half == pytest.approx(0.7001, abs=1e-4)
    assert found.mean + found.half == pytest.approx(2.4599, abs=1e-4)
    assert found.p == pytest.approx(0.002833, abs=1e-6) and found.clear
    assert found.shown(2, sign=True) == "+1.58 ± 0.88"


def test_the_interval_is_scipys():
    scipy = pytest.importorskip("scipy.stats")
    values = [0.3, -0.2, 0.9, 0.1]
    theirs = scipy.ttest_1samp(values, 0.0)
    low, high = theirs.confidence_interval(0.95)
    ours = estimate(values)
    assert (ours.mean - ours.half, ours.mean + ours.half, ours.p) == pytest.approx((low, high, theirs.pvalue))


def test_few_and_lost_values():
    none, one, lost = estimate([]), estimate([2.0]), estimate([1.0, math.nan, 3.0, math.inf])
    assert none.n == 0 and none.shown() == "–" and not none.clear
    assert one.shown() == "2.000" and not one.clear and math.isnan(one.p)
    assert (lost.mean, lost.n, lost.lost) == (2.0, 2, 2)
    assert estimate([1.0, 1.0]).p == 0.0 and estimate([0.0, 0.0]).p == 1.0
    assert Estimate(-0.5, 0.1, 5, 0.0).shown(1) == "−0.5 ± 0.1"
    assert Estimate(-1e-5, 0.001, 5, 0.9).shown(sign=True) == "+0.000 ± 0.001"


def test_pairs_are_of_the_seeds_that_both_have():
    ours, theirs = {0: 1.0, 1: 2.0, 2: math.nan, 4: 9.0}, {0: 0.5, 1: 1.0, 2: 1.0, 3: 7.0}
    pairs = combined([(1, ours), (-1, theirs)])
    assert pairs.pop(0) == 0.5 and pairs.pop(1) == 1.0
    assert set(pairs) == {2} and math.isnan(pairs[2]), "a diverged run stays, to be counted"
    assert combined([]) == {}


def test_holm_steps_down():
    # Holm (1979): the least p is multiplied by m, the next by m − 1, and none may fall below the one before
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    few = holm([0.01, math.nan, math.nan, math.nan])
    assert few[0] == 0.04 and all(map(math.isnan, few[1:])), "missing ones count in the family"


def test_interpolation_is_in_log_x_and_refuses_to_extrapolate():
    points = {1.0: 3.0, 4.0: 1.0, 8.0: 0.5}
    assert interpolate(points, 2.0) == pytest.approx(2.0) and interpolate(points, 8.0) == 0.5
    for x in (0.9, 8.1):
        with pytest.raises(ValueError, match="outside"):
            interpolate(points, x)
    with pytest.raises(ValueError, match="none"):
        interpolate({}, 1.0)
