"""The compiled core, its implementations by name, and the patterns and inputs on which they must equal the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import nmkernels  # noqa: F401 - registers the backends
from nmkernels._capability import compiled_core
from nmkernels._dispatch import implementations

Run = Callable[..., Any]


@pytest.fixture
def cpu() -> Callable[[str], Run]:
    """``cpu("nm_mask")`` is the compiled implementation of that op."""
    if not compiled_core().ok:
        pytest.skip(compiled_core().reason)
    return lambda op: next(i.fn for i in implementations(op) if i.backend == "cpu")


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"threads{n}")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Each number of threads, put back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
