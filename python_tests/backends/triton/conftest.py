"""Where the Triton kernels run: on a GPU, or interpreted on the CPU, which must be said before Triton is imported.

    TRITON_INTERPRET=1 python -m pytest python_tests/backends/triton

A test that takes ``device`` needs one of the two.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nmkernels import capability, dispatch
from nmkernels.backends.triton import NAME, interpreted

# asked to interpret, a missing Triton is a failure: of the import in the tests
collect_ignore_glob = [] if interpreted() or capability.triton().ok else ["test_*.py"]


@pytest.fixture(scope="session", params=["cpu" if interpreted() else pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The device on which the Triton backend runs here: "cpu" interpreted, else "cuda"."""
    return str(request.param)


@pytest.fixture(scope="session")
def ours(device: str) -> Callable[[str], dispatch.Impl]:
    """``ours("nm_mask")``: this backend's entry for an op."""
    return lambda op: next(i for i in dispatch.implementations(op) if i.backend == NAME)
