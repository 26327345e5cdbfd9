"""No algorithm is used unchecked; the fastest right one is found, stored and read again."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from nmkernels import BackendError, capability
from nmkernels.backends.cusparselt import Algorithm, Matmul, algorithms, context, search, search_gemm
from nmkernels.backends.cusparselt.algorithms import Trial
from nmkernels.timing import Validator
from python_tests.backends.cusparselt.conftest import check, forget, in_threads, normal, packed, routes

DEFAULT = Algorithm()


def arguments(tokens=16, bias=False, activation=""):
    return normal(tokens, 64), *packed(), normal(32, seed=3) if bias else None, activation


def used():
    """The algorithm that this thread's only fprop is done by."""
    (found,) = {ready.algorithm for key, ready in routes().items() if not isinstance(key, Matmul)}
    return found


@pytest.fixture
def right(ours):
    """``right(*arguments())``: the call is right; returns the algorithm that did it."""

    def right(*args) -> Algorithm:
        routes().clear()
        check(ours, "nm_linear", *args)
        return used()

    return right


def clock(*seconds: float):
    """A timer by which each candidate takes the seconds that are next when it is met first; then as many as the last."""
    left, took = list(seconds), {}

    def timer(call) -> float:
        call()
        if call.name not in took:
            took[call.name] = left.pop(0) if len(left) > 1 else left[0]
        return took[call.name]

    return timer


# ---- without a search


@pytest.mark.parametrize(
    ("fault", "words"),
    [("wrong", "max error .* against float64 is above"), ("random", "two runs differ"), ("unwritten", "max error nan")],
)
def test_a_default_that_is_wrong_is_not_used(fake, ours, right, tmp_path, fault, words) -> None:
    fake.set(f"{fault}:0")
    assert right(*arguments()) == Algorithm(1)
    assert [ready.algorithm for ready in context.session_on(0).plans.values()] == [Algorithm(1)], "what is wrong is not kept"
    for i in range(1, 4):
        fake.set(f"{fault}:{i}")
    forget()
    with pytest.raises(BackendError, match=f"none of its algorithms computes .* correctly: the default algorithm: {words}.*algorithm 3"):
        ours("nm_linear").fn(*arguments())
    runs = fake.calls("Matmul")
    can, reason = ours("nm_linear").supports(*arguments())
    assert not can and "none of its algorithms" in reason
    with pytest.raises(BackendError, match="none of its algorithms"):
        ours("nm_linear").fn(*arguments())
    assert fake.calls("Matmul") == runs, "it is remembered"
    found = search("nm_linear", *arguments())
    assert not found.seconds and len(found.refused) == 5 and found.path is None
    assert "no candidate is correct, 5 refused (nothing to store)" in str(found) and not list(tmp_path.glob("*.json"))


def test_a_gemm_is_checked_once_in_a_process(fake, right) -> None:
    right(*arguments())
    assert fake.calls("Matmul") == 3, "two runs for the check, and the call"
    in_threads(lambda: right(*arguments()))
    assert fake.calls("Matmul") == 4
    right(*arguments(tokens=24))
    assert fake.calls("Matmul") == 7


def test_no_memory_to_check_with_is_no_verdict(fake, ours, right, monkeypatch) -> None:
    with monkeypatch.context() as m:
        m.setattr(algorithms, "Trial", Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(BackendError, match="no memory to check nt.bfloat16.bfloat16.plain.32x64x16 with"):
            ours("nm_linear").fn(*arguments())
        with pytest.raises(BackendError, match="no memory to search nt.bfloat16.bfloat16.plain.32x64x16 in"):
            search("nm_linear", *arguments())
    right(*arguments())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_what_surrounds_the_first_call_does_not_change_the_bound(fake, dtype) -> None:
    def validator() -> Validator:
        return Trial(Matmul("nt", dtype, torch.float16, 32, 64, 16), context.session_on(0), torch.empty(0), 0).validator

    first = validator()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            second = validator()
    finally:
        torch.set_default_dtype(torch.float32)
    assert second.bound == first.bound and torch.equal(second.exact, first.exact)


# ---- with one


def test_search_takes_the_fastest_right_one(fake, right) -> None:
    fake.set("limit", 6)
    for fault in ("wrong:2", "random:3", "unwritten:4"):
        fake.set(fault)
    assert right(*arguments(bias=True)) == DEFAULT
    # the default, 0, 1, 5; then the splits
    found = search("nm_linear", *arguments(bias=True), timer=clock(9, 8, 7, 5, 20))
    assert (found.best, found.seconds["algorithm 5"], found.seconds[found.baseline]) == ("algorithm 5", 5, 9)
    reasons = found.refused
    assert "max error 99" in reasons["algorithm 2"] and reasons["algorithm 3"] == "two runs differ" and "nan" in reasons["algorithm 4"]
    assert sum("cusparseLtMatmulAlgSetAttribute failed" in reason for reason in reasons.values()) == 3, "mode 6 of the 3 fastest"
    assert len(found.seconds) == 4 + 18
    assert len(context.session_on(0).plans) == 0, "those of a search are taken back"
    assert right(*arguments(bias=True)) == Algorithm(5)
    assert "|nt|bfloat16|bfloat16|bias|32x64|16: algorithm 5, 5000000.0 us, default 9000000.0 us, 6 refused" in str(found)


def test_splits_of_the_sum_are_searched_and_checked(fake) -> None:
    fake.set("split wrong:1")
    # default, 0 .. 3: algorithm 1 is the fastest, but not when the sum is split
    found = search("nm_linear", *arguments(), timer=clock(9, 9, 1, 3, 4, *[0.9] * 3, 0.5, 0.8))
    wrong = Counter(name.split(",")[0] for name, why in found.refused.items() if "max error" in why)
    assert wrong == {"algorithm 1": 6}
    assert found.best == "algorithm 2, sum split in 4 in two kernels"


def test_searches_of_other_gemms(fake) -> None:
    found = search("nm_linear_wgrad", *packed(), normal(64, 16))  # by the clock
    assert found.seconds[found.best] > 0 and "|tn.packed|" in found.problem
    problem = Matmul("tn", torch.float16, torch.float16, 32, 64, 16, residual=True)
    assert search_gemm(problem, torch.empty(0), timer=clock(9, 9, 3, 9)).best == "algorithm 1"
    assert algorithms.plan_for(problem, context.session_on(0), torch.empty(0), 0).algorithm == Algorithm(1)


def test_what_search_leaves_alone(fake, capture) -> None:
    with pytest.raises(BackendError, match="nm_mask: cuSPARSELt supports only nm_linear and nm_linear_wgrad"):
        search("nm_mask", torch.ones(4, 4), 2, 4)
    fake.set("no bias")
    found = search("nm_linear", *arguments(bias=True), timer=clock(1.0))
    assert "|plain|" in found.problem, "fused as far as the library goes"
    fake.set("fail:MatmulDescriptorInit", 10)
    with pytest.raises(BackendError, match="cusparseLtMatmulDescriptorInit failed"):
        search("nm_linear", *arguments(tokens=32))
    capture(True)
    with pytest.raises(BackendError, match="a CUDA graph is being captured"):
        search("nm_linear", *arguments())


# ---- on disk


def lines() -> dict:
    return json.loads(Path(algorithms.TABLE.path()).read_text())["lines"]


@pytest.fixture
def third(fake):
    """Algorithm 3 is stored for ``arguments()``, and this process knows nothing."""
    search("nm_linear", *arguments(), timer=clock(9, 9, 9, 9, 2))
    forget()


def test_a_choice_is_stored_and_read_again(fake, right) -> None:
    args = arguments(bias=True, activation="relu2")
    found = search("nm_linear", *args, timer=clock(9, 9, 9, 2, 9))
    assert found.path == str(algorithms.TABLE.path())
    ((key, line),) = lines().items()
    assert key.startswith("cusparselt|") and key.endswith("|cuSPARSELt 0.8.0|nt|bfloat16|bfloat16|bias+relu|32x64|16")
    assert line["choice"] == {"id": 2, "splits": 1, "mode": 0, "width": 16, "replan": False}
    assert line["us"]["algorithm 2"] == 2e6 and line["us"]["the default algorithm"] == 9e6
    forget()
    runs = fake.calls("Matmul")
    assert right(*args) == Algorithm(2)
    assert fake.calls("Matmul") == runs + 1, "the search has checked it"


def test_another_width_of_the_class_is_checked(fake, right) -> None:
    search("nm_linear", *arguments(tokens=32), timer=clock(9, 9, 9, 2, 9))
    forget()
    runs = fake.calls("Matmul")
    assert right(*arguments(tokens=24)) == Algorithm(2) and fake.calls("Matmul") == runs + 3
    forget()
    fake.set("wrong:2")
    assert right(*arguments(tokens=24)) == DEFAULT
    assert right(*arguments(tokens=64)) == DEFAULT, "another class"


def test_a_stored_id_that_no_longer_exists(fake, right, third) -> None:
    fake.set("limit", 3)
    with pytest.warns(RuntimeWarning, match="is ignored: this library has no algorithm 3. Run nm.tune again"):
        assert right(*arguments()) == DEFAULT


@pytest.mark.parametrize(
    "line", [{}, "cpu rows", {"id": "2", "splits": 1, "mode": 0, "width": 16}, {"id": 2, "splits": 1, "mode": 5, "width": 16}]
)
def test_an_edited_table_line(fake, right, third, line) -> None:
    (key,) = lines()
    algorithms.TABLE.store({key: {"choice": line}})
    forget()
    with pytest.warns(RuntimeWarning, match="is ignored: "):
        assert right(*arguments()) == DEFAULT


def test_what_is_known_of_biases_is_stored(fake, right) -> None:
    fake.set("frozen bias")
    args = arguments(bias=True)
    search("nm_linear", *args, timer=clock(9, 2))
    assert all(line["choice"]["replan"] for line in lines().values())
    forget()
    capability.opened()[0].replan = False
    right(*args)
    right(*args[:6], normal(32, seed=5), "")
