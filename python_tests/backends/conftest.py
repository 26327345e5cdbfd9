"""The compiled implementations by the names of their ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

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
