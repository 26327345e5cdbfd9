"""Which backend runs: by priority, by force, by what it declines; and the words for it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from nmkernels import BackendError, dispatch, ops
from nmkernels.backends import triton
from nmkernels.backends.cpu import core
from nmkernels.capability import Probe
from nmkernels.dispatch import ENV, choose, impl, implementations, verdicts
from python_tests.for_each import for_each

W = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV, raising=False)
    monkeypatch.setattr(dispatch, "_logged", set())


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An op with a slow backend that does everything and a fast one that wants even numbers."""
    monkeypatch.setattr(dispatch, "_impls", dict(dispatch._impls))

    @impl("toy", backend="slow", priority=0)
    def slow(x: int) -> tuple[str, int]:
        return "slow", x

    @impl("toy", backend="fast", priority=10, supports=lambda x: (x % 2 == 0, "even" if x % 2 == 0 else f"{x} is odd"))
    def fast(x: int) -> tuple[str, int]:
        return "fast", x

    yield "toy"


def test_priority_and_fall_back(toy: str, caplog: pytest.LogCaptureFixture) -> None:
    assert [i.backend for i in implementations(toy)] == ["fast", "slow"]
    assert choose(toy, 2).backend == "fast" and choose(toy, 2).fn(2) == ("fast", 2)
    with caplog.at_level(logging.DEBUG, "nmkernels.dispatch"):
        assert choose(toy, 3).backend == "slow"
        assert choose(toy, 3).backend == "slow"
    assert [r.getMessage() for r in caplog.records] == ["toy: fast declined: 3 is odd"]
    # a second registration replaces the first
    impl(toy, backend="fast", priority=-1)(lambda x: ("new", x))
    assert [i.backend for i in implementations(toy)] == ["slow", "fast"] and implementations(toy)[1].fn(1) == ("new", 1)


def test_forced(toy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, "slow")
    assert choose(toy, 2).backend == "slow"
    monkeypatch.setenv(ENV, "fast")
    assert choose(toy, 2).backend == "fast"
    with pytest.raises(BackendError, match=f"toy: backend 'fast' is forced by {ENV} .*: 3 is odd. Unset"):
        choose(toy, 3)
    monkeypatch.setenv(ENV, "quick")
    with pytest.raises(BackendError, match="'quick' names no backend of this op; choose one of fast, slow"):
        choose(toy, 2)


def test_no_backend_can_run_it(toy: str) -> None:
    impl(toy, backend="slow", priority=0, supports=lambda x: (False, "asleep"))(lambda x: x)
    with pytest.raises(BackendError, match=r"(?s)fast +declined: 1 is odd.*slow +declined: asleep.*no backend can run"):
        choose(toy, 1)


def test_verdicts(toy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(toy, 2).split("\n") == ["toy:", "  fast       chosen", "  slow       can run, lower priority"]
    assert verdicts(toy, 3).split("\n") == ["toy:", "  fast       declined: 3 is odd", "  slow       chosen"]
    monkeypatch.setenv(ENV, "slow")
    assert verdicts(toy, 2).split("\n") == ["toy:", f"  fast       skipped, {ENV}=slow", "  slow       chosen"]
    monkeypatch.setenv(ENV, "fast")
    assert verdicts(toy, 3).split("\n")[-1] == "  no backend can run this call"
    with pytest.raises(BackendError, match=r"no op is called 'nm_maks'; ops are: .*nm_mask"):
        verdicts("nm_maks", W, 2, 4)


def test_verdicts_on_real_ops() -> None:
    lines = verdicts("nm_mask", W.double(), 2, 4).splitlines()
    # what is asked after it, an emulator that tests have built, is never chosen by itself
    assert lines[0] == "nm_mask:" and "  reference  chosen" in lines
    assert any(line.startswith("  cpu        declined: ") and "float64" in line for line in lines)


def test_triton_gives_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(x: torch.Tensor) -> str:
        (line,) = (line for line in verdicts("nm_mask", x, 2, 4).splitlines() if line.startswith("  triton"))
        return line.removeprefix("  triton     ")

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton, "triton_probe", lambda: Probe(True, "triton 3.6.0"))
    assert said(W) == "declined: it compiles for GPUs, and one of these tensors is on cpu"
    assert "it computes in float32, and this call is in float64" in said(W.double())
    assert "it runs on cuda and xpu, and one of these tensors is on meta" in said(W.to("meta"))
    assert "one of these tensors is on cpu" in said(W.to_sparse())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert said(W) == "can run, lower priority" and "is torch.sparse_coo; call .to_dense()" in said(W.to_sparse())
    monkeypatch.setattr(triton, "triton_probe", lambda: Probe(False, "triton is not installed"))
    assert said(W) == "declined: triton is not installed"


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_environment_forces_real_ops(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def spy(entry: dispatch.Impl) -> dispatch.Impl:
        def fn(*args: Any, **options: Any) -> Any:
            ran.append(entry.backend)
            return entry.fn(*args, **options)

        return replace(entry, fn=fn)

    monkeypatch.setattr(dispatch, "_impls", {op: [spy(i) for i in entries] for op, entries in dispatch._impls.items()})
    monkeypatch.setenv(ENV, backend)
    ops.mask(W, "2:4")
    ops.mask(W, "2:4", out=torch.empty(4, 8, dtype=torch.bool))
    ops.compress(W, "2:4", out=ops.compress(W, "2:4"))
    assert ran == [backend] * 4
    if backend == "cpu":
        with pytest.raises(BackendError, match=r"nm_mask: backend 'cpu'.*float64"):
            ops.mask(W.double(), "2:4")


@pytest.fixture
def coreless(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in an install that found no compiler."""
    for module in (dispatch, core):
        monkeypatch.setattr(module, "compiled_core", lambda: Probe(False, "it is not built; build it"))
    dispatch._warn_core_missing.cache_clear()
    yield
    dispatch._warn_core_missing.cache_clear()


def _said_by(*calls: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for call in calls:
            call()
    return [str(w.message) for w in said]


@for_each("case", ["float64", "meta", "sparse", "explain", "forced"])
def test_what_the_core_would_not_run_is_no_reason_to_warn(coreless: None, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "forced":
        monkeypatch.setenv(ENV, "reference")
    x = {"float64": W.double(), "meta": W.to("meta"), "sparse": W.to_sparse()}.get(case, W)
    assert _said_by(lambda: verdicts("nm_mask", x, 2, 4) if case == "explain" else choose("nm_mask", x, 2, 4)) == []


def test_no_warning_with_a_core() -> None:
    dispatch._warn_core_missing.cache_clear()
    assert _said_by(lambda: ops.mask(W.double(), "2:4"), lambda: core.compiled_core().ok and ops.mask(W, "2:4")) == []
