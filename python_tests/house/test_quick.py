"""Which cases of a test make test runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from python_tests.conftest import mark_slow

CASES = [(backend, n) for n in range(3) for backend in ("cpu", "cuda")]


@pytest.mark.parametrize(("backend", "n"), CASES)
@pytest.mark.quick(2, per="backend")
def test_the_first_of_each_kind_are_quick(request: pytest.FixtureRequest, backend: str, n: int) -> None:
    assert (request.node.get_closest_marker("slow") is not None) == (n >= 2)


@pytest.mark.parametrize("given", [Path("a/x"), Path("b/x"), Path("a/y")], ids=str)
@pytest.mark.quick(per="given.name")
def test_a_kind_may_be_an_attribute(request: pytest.FixtureRequest, given: Path) -> None:
    assert (request.node.get_closest_marker("slow") is not None) == (given == Path("b/x"))


def test_without_cases_nothing_is_slow(request: pytest.FixtureRequest) -> None:
    mark_slow([request.node])
    assert request.node.get_closest_marker("slow") is None
