"""The compiled implementations by the names of their ops, under every instruction set that this processor runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import nmkernels  # noqa: F401 - registers the backends
from nmkernels.capability import compiled_core
from nmkernels.dispatch import implementations

Run = Callable[..., Any]


def instruction_sets() -> list[str]:
    """Those that this build has and this processor runs, the one that users get first; one name that skips where there is no core."""
    return list(import_module("nmkernels._C").isas())[::-1] if compiled_core().ok else ["none"]


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The instruction set that the core uses during the test."""
    if not compiled_core().ok:
        pytest.skip(compiled_core().reason)
    core = import_module("nmkernels._C")
    before = core.isa()
    core.use_isa(request.param)
    yield request.param
    core.use_isa(before)


@pytest.fixture
def cpu(isa: str) -> Callable[[str], Run]:
    """``cpu("nm_mask")`` is the compiled implementation of that op."""
    return lambda op: next(i.fn for i in implementations(op) if i.backend == "cpu")


@pytest.fixture
def device() -> str:
    """Where the suites that all backends share run here; the folders of GPUs have their own, and their own ``ours``."""
    return "cpu"


@pytest.fixture
def ours(cpu: Callable[[str], Run]) -> Callable[[str], Any]:
    return lambda op: SimpleNamespace(fn=cpu(op))


@pytest.fixture
def on_threads() -> Callable[[Run], list[Any]]:
    """What a call gives on 1, 2 and 3 threads."""

    def run(call: Run) -> list[Any]:
        before, results = torch.get_num_threads(), []
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                results.append(call())
        finally:
            torch.set_num_threads(before)
        return results

    return run
