"""A library with cuSPARSELt's entry points that works on the CPU, built here: ``csrc/tests/cusparselt/fake.cpp``."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nmkernels import capability, dispatch
from nmkernels.backends.cusparselt import algorithms, blobs, context, gemm, linear

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
    context._threads.here.clear()
    for module in (blobs, algorithms, linear):
        module.forget()


@pytest.fixture
def fake(_built: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Fake]:
    """The library of the tests instead of cuSPARSELt. At the end nothing of it may live, and it must have been called rightly."""
    monkeypatch.setenv(capability.ENV, str(_built.path))
    monkeypatch.setenv("NMKERNELS_CACHE", str(tmp_path))
    _built.reset()
    library, reason = capability.opened()
    assert library is not None, reason
    library.replan = False
    forget()
    before = _built.get("live")
    yield _built
    _built.set("device", 0)
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
        for module in (context, blobs, linear, gemm):
            monkeypatch.setattr(module, "capturing", lambda _: on)

    return set


def routes(device: int = 0) -> dict[Any, Any]:
    """What this thread knows how to multiply."""
    return context.here(device).routes
