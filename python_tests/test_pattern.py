"""Pattern: what it accepts, what it computes, and how it refuses."""

from __future__ import annotations

import copy
import pickle

import pytest

from nmkernels import NMError, Pattern, PatternError, ShapeError
from python_tests.for_each import for_each


@for_each("spec, n, m", [("2:4", 2, 4), (" 1 : 16 ", 1, 16), ("256:256", 256, 256), ("1:1", 1, 1), (Pattern("3:5"), 3, 5)])
def test_accepted(spec: object, n: int, m: int) -> None:
    p = Pattern(spec)  # type: ignore[arg-type]
    assert (p.n, p.m) == (n, m) and p == Pattern(n, m) and hash(p) == hash(Pattern(n, m)) and p != Pattern("7:9")


@for_each("spec", ["4:2", "0:4", "2:512", "0:0", "3:0"])
def test_out_of_range(spec: str) -> None:
    with pytest.raises(PatternError, match=rf"pattern {spec} is not usable.*1 <= N <= M <= 256"):
        Pattern(spec)


@for_each("spec", ["x", "", "2", "2:", ":4", "2:4:8", "2/4", "-2:4", "2.0:4", "2:4\nx", 2.4, None, 2, (2, 4), ["2:4"], b"2:4", True])
def test_not_a_pattern(spec: object) -> None:
    with pytest.raises(PatternError, match=r"is not an N:M pattern; write it as text") as error:
        Pattern(spec)  # type: ignore[arg-type]
    assert isinstance(error.value, ValueError) and isinstance(error.value, NMError) and repr(spec) in str(error.value)


@for_each("spec, cols, groups, kept, size", [("2:4", 12, 3, 6, 2), ("2:4", 9, 3, 6, 2), ("2:4", 0, 0, 0, 0), ("1:8", 24, 3, 3, 2)])
def test_sizes(spec: str, cols: int, groups: int, kept: int, size: int) -> None:
    p = Pattern(spec)
    assert (p.groups(cols), p.kept(cols), p.index_bytes(cols)) == (groups, kept, size)
    assert Pattern("1:32").index_bytes(96) == 3


def test_bits_of_an_index() -> None:
    assert [Pattern(1, m).index_bits for m in (1, 4, 5, 16, 17, 256)] == [2, 2, 4, 4, 8, 8]  # type: ignore[arg-type]


def test_check_divides() -> None:
    Pattern("2:4").check_divides("op", 8)
    with pytest.raises(ShapeError, match=r"op: in_features is 770.*multiple of M=4 \(pattern 2:4\).*Pad it to 772"):
        Pattern("2:4").check_divides("op", 770, "in_features")


def test_is_a_value() -> None:
    p = Pattern("2:4")
    assert str(p) == "2:4" and repr(p) == 'Pattern("2:4")' and eval(repr(p)) == p and p.density == 0.5
    for baseline in (pickle.loads(pickle.dumps(p)), copy.deepcopy(p)):
        assert baseline == p
    with pytest.raises(AttributeError):
        p.n = 3  # type: ignore[misc]
