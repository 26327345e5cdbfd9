"""A library with cuSPARSELt's entry points that works on the CPU, built here: ``csrc/tests/cusparselt/fake.cpp``."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from nmkernels import Pattern, capability, dispatch, reference, testing
from nmkernels.backends import streams
from nmkernels.backends.cusparselt import algorithms, blobs, context, linear

SOURCE = Path(__file__).resolve().parents[3] / "csrc" / "tests" / "cusparselt" / "fake.cpp"


class Fake:
    """Tells the library what to do, and asks it what was done to it."""

    def __init__(self, path: Path) -> None:
        self.path, self._library = path, ctypes.CDLL(str(path))
        self._library.get.restype = ctypes.c_longlong
        self.misused = False
        """Set by tests that call it wrongly on purpose."""

    def set(self, what: str, value: int = 1) -> None:
        self._library.set(what.encode(), ctypes.c_longlong(value))

    def get(self, what: str) -> int:
        return int(self._library.get(what.encode()))

    def calls(self, entry: str) -> int:
        return self.get(f"calls:{entry}")

    def reset(self) -> None:
        self._library.reset()
        self.misused = False


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``build("name", "-DOPTION")``: the library as compiled with options."""
    if not SOURCE.exists() or shutil.which("c++") is None:
        pytest.skip("the library of the tests needs the sources and a C++ compiler")
    if not capability.compiled_core().ok:
        pytest.skip(capability.compiled_core().reason)
    folder = tmp_path_factory.mktemp("cusparselt")

    def compile(name: str, *options: str) -> Path:
        path = folder / f"{name}.so"
        subprocess.run(["c++", "-std=c++17", "-O1", "-shared", "-fPIC", *options, str(SOURCE), "-o", str(path)], check=True)
        return path

    return compile


@pytest.fixture(scope="session")
def _built(build: Callable[..., Path]) -> Fake:
    return Fake(build("fake"))


def forget() -> None:
    """As if nothing had been multiplied in this process."""
    context._threads.sessions.clear()
    for remembered in (blobs._entries, algorithms._checked, linear._GELU):
        remembered.clear()
    algorithms.TABLE.forget()


@pytest.fixture
def fake(_built: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Fake]:
    """The library of the tests instead of cuSPARSELt. At the end nothing of it may live, and it must have been called rightly."""
    monkeypatch.setenv(capability.ENV, str(_built.path))
    monkeypatch.setenv("NMKERNELS_CACHE", str(tmp_path))
    _built.reset()
    capability._opened.cache_clear()
    library, reason = capability.opened()
    assert library is not None, reason
    library.replan = False
    forget()
    before = _built.get("live")
    yield _built
    _built.set("device", 0)
    capability._opened.cache_clear()
    forget()
    assert _built.get("live") == before
    assert _built.misused or _built.get("errors") == 0


@pytest.fixture
def ours() -> Callable[[str], dispatch.Impl]:
    """``ours("nm_linear")``: the backend's entry for an op."""
    return lambda op: next(entry for entry in dispatch.implementations(op) if entry.backend == linear.NAME)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """``capture(True)``: from now on a CUDA graph is being captured."""

    def set(on: bool) -> None:
        monkeypatch.setattr(streams, "capturing", lambda _: on)

    return set


def routes(device: int = 0) -> dict[Any, Any]:
    """What this thread knows how to multiply."""
    return context.session_on(device).routes


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(rows: int = 32, cols: int = 64, dtype: torch.dtype = torch.bfloat16, pattern: str = "2:4", seed: int = 1) -> tuple[Any, ...]:
    """A weight as raw ops take it: values, indices, N, M and columns."""
    p = Pattern(pattern)
    return *reference.compress(normal(rows, cols, dtype=dtype, seed=seed), p.n, p.m), p.n, p.m, cols


def check(ours: Callable[[str], dispatch.Impl], op: str, *args: Any, **options: Any) -> Tensor:
    """Runs ours, and compares it with what torch computes from the dense operands, in its dtype and in float64."""
    can, reason = ours(op).supports(*args)
    assert can, reason
    y = ours(op).fn(*args, **options)
    compare(y, op, *args)
    return y


def compare(y: Tensor, op: str, *args: Any) -> None:
    testing.assert_no_worse(y.cpu(), *(_dense(op, dtype, *args) for dtype in (y.dtype, torch.float64)))


def _dense(op: str, dtype: torch.dtype, *args: Any) -> Tensor:
    cpu = [a.cpu() if isinstance(a, Tensor) else a for a in args]
    wide = [a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in cpu]
    run = reference.linear if op == "nm_linear" else reference.linear_wgrad
    # the reference rounds once; torch's own way, one op after the other, is what is allowed twice
    if dtype == torch.float64 or op != "nm_linear":
        return run(*wide)
    x, values, indices, n, m, cols, bias, activation, residual = (*wide, *(None, "", None)[len(wide) - 6 :])
    y = reference.linear.__globals__["ACTIVATIONS"][activation](run(x, values, indices, n, m, cols, bias))
    return y if residual is None else y + residual


def in_threads(*works: Callable[[], object]) -> None:
    """Runs each in a thread of its own, all at once, and raises what one of them has raised."""
    all_there = Barrier(len(works))  # or a quick thread would take the next work too
    with ThreadPoolExecutor(len(works)) as pool:
        list(pool.map(lambda work: (all_there.wait(), work()), works))
