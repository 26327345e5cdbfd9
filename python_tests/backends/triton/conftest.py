"""Where the Triton kernels run: on a GPU, or interpreted on the CPU, which must be said before Triton is imported.

    TRITON_INTERPRET=1 python -m pytest python_tests/backends/triton

A test that takes ``device`` needs one of the two; without, it is marked ``gpu`` and skipped where there is none.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nmkernels import capability
from nmkernels.backends.triton import interpreted

HERE = Path(__file__).parent
HOW = "TRITON_INTERPRET=1 python -m pytest python_tests/backends/triton"

# asked to interpret, a missing Triton is a failure: of the import in the tests
collect_ignore_glob = [] if interpreted() or capability.triton().ok else ["test_*.py"]


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    can, reason = capability.cuda_device()
    for item in (i for i in items if HERE in i.path.parents):
        if interpreted():
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="TRITON_INTERPRET=1 runs nothing on a GPU"))
        elif "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)
            if not can:
                item.add_marker(pytest.mark.skip(reason=f"{reason}; without one: {HOW}"))


@pytest.fixture(scope="session")
def device() -> str:
    """The device on which the Triton backend runs here: "cpu" interpreted, else "cuda"."""
    return "cpu" if interpreted() else "cuda"
