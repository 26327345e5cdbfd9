"""Products to choose for, and a clock that says what it is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nmkernels.autograd.choice import Call, Product
from nmkernels.capability import compiled_core

CPU = torch.device("cpu")
FPROP = Product("fprop", 20, 16, 32, 2, 4, torch.float32, CPU)
ODD = FPROP._replace(n=7, m=8)
"""By rule dense."""

needs_core = pytest.mark.skipif(not compiled_core().ok, reason=compiled_core().reason)


def clock(**seconds: float) -> Callable[[Call], float]:
    """What each candidate takes, ``dense=1.0`` or ``mine_rows=0.5``; 1 s for all others."""

    def timer(call: Call) -> float:
        call()
        return seconds.get(call.name.replace(" ", "_"), 1.0)

    return timer
