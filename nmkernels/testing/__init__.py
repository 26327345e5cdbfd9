"""Helpers for the tests, the benchmarks and users' own tests."""

from .cases import EdgeCase, cases
from .compare import assert_equal_bits, assert_no_worse, equal_bits
from .poison import fill_poison, poison

__all__ = ["EdgeCase", "assert_equal_bits", "assert_no_worse", "cases", "equal_bits", "fill_poison", "poison"]
