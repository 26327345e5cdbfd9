"""The compiled core itself, without the package around it."""

from __future__ import annotations

from types import ModuleType

import pytest

from nmkernels.capability import compiled_core


@pytest.fixture(scope="session")
def core() -> ModuleType:
    if not compiled_core().ok:
        pytest.skip(compiled_core().reason)
    import nmkernels._C as module

    return module
