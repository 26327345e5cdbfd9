"""Where the Triton kernels run: on a GPU, or interpreted on the CPU, which must be said before Triton is imported.

    TRITON_INTERPRET=1 python -m pytest python_tests/backends/triton

A test that takes ``device`` needs one of the two; without interpreter it is marked ``gpu``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nmkernels import capability, dispatch
from nmkernels.backends.triton import NAME, interpreted

HERE = Path(__file__).parent
HOW = "TRITON_INTERPRET=1 python -m pytest python_tests/backends/triton"

# asked to interpret, a missing Triton is a failure: of the import in the tests
collect_ignore_glob = [] if interpreted() or capability.triton().ok else ["test_*.py"]


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where nothing can run, one skipped test stands for all that take a device."""
    here = [i for i in items if HERE in i.path.parents]
    if interpreted():
        why, needing = "TRITON_INTERPRET=1 runs nothing on a GPU", [i for i in here if i.get_closest_marker("gpu")]
    else:
        can, reason = capability.cuda_device()
        why, needing = f"{reason}; without one: {HOW}", [i for i in here if "device" in getattr(i, "fixturenames", ())]
        for item in needing:
            item.add_marker(pytest.mark.gpu)
        if can:
            return
        needing += [i for i in here if i not in needing and i.get_closest_marker("gpu")]
    for item in needing[:1]:
        item.add_marker(pytest.mark.skip(reason=why))
    left = set(needing[1:])
    items[:] = [i for i in items if i not in left]
    config.hook.pytest_deselected(items=list(left))


@pytest.fixture(scope="session")
def device() -> str:
    """The device on which the Triton backend runs here: "cpu" interpreted, else "cuda"."""
    return "cpu" if interpreted() else "cuda"


@pytest.fixture(scope="session")
def ours(device: str) -> Callable[[str], dispatch.Impl]:
    """``ours("nm_mask")``: this backend's entry for an op."""
    return lambda op: next(i for i in dispatch.implementations(op) if i.backend == NAME)
