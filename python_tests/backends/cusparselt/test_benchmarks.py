"""Benchmarks have a row for the library's default algorithm and one for the fastest that a search finds; neither costs the other."""

from __future__ import annotations

import pytest

from bench import cases, runner
from bench.registry import Provider, Spec
from bench.runner import Partly
from nmkernels.backends.cusparselt import Algorithm, algorithms
from nmkernels.timing import Timer
from python_tests.backends.cusparselt.conftest import forget, routes

DEFAULT, SEARCHED = "nmkernels cusparselt, canonical", "nmkernels cusparselt, canonical, searched"
SPECS = [Spec("nm_linear(cores)", "2:4", "bfloat16", 32, 64, 16), Spec("nm_linear_wgrad(cores)", "2:4", "bfloat16", 32, 48, 64)]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Algorithm 2 is the fastest; no GEMM of the machine's is timed."""
    monkeypatch.setattr("bench.runner.matmul_rate", lambda dtype, device: 1e9)
    monkeypatch.setattr(
        Timer, "compare", lambda self, calls, seconds: ({name: 1.0 if name == "algorithm 2" else 2.0 for name in calls}, {})
    )


def providers(spec: Spec) -> dict[str, Provider]:
    return {p.name: p for p in cases.build(spec, "cpu").providers}


def used(p: Provider) -> Algorithm:
    """The algorithm that a call of a provider is done by."""
    with p.under():
        p.call()
        return next(ready.algorithm for ready in routes().values())


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.op)
def test_each_is_done_by_its_own_algorithm(fake, spec: Spec) -> None:
    every = providers(spec)
    for _ in range(2):
        assert used(every[DEFAULT]) == Algorithm() and used(every[SEARCHED]) == Algorithm(2)


def test_what_was_stored_before_is_no_default(fake) -> None:
    spec = SPECS[0]
    assert used(providers(spec)[SEARCHED]) == Algorithm(2)
    forget()  # as another process, which finds it on disk
    assert used(providers(spec)[DEFAULT]) == Algorithm()


@pytest.mark.quick
@pytest.mark.parametrize("lost", [DEFAULT, SEARCHED])
def test_one_that_fails_costs_itself_alone(fake, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("no memory to search in")

    if lost == SEARCHED:
        monkeypatch.setattr("nmkernels.backends.cusparselt.search", fails)
    else:
        monkeypatch.setattr(algorithms, "first_right", fails)
    with pytest.raises(Partly, match=f"timed without {lost}: RuntimeError: no memory to search in") as partly:
        runner.measure(SPECS[0], "cpu", 0.0)
    found = {r.provider for r in partly.value.rows}
    assert {DEFAULT, SEARCHED, "torch dense"} - {lost} <= found and lost not in found


def test_no_correct_algorithm_is_an_error(fake) -> None:
    for i in range(4):
        fake.set(f"wrong:{i}")
    with pytest.raises(Partly, match="no candidate is correct"):
        runner.measure(SPECS[0], "cpu", 0.0)
