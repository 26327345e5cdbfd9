"""MaskedAdamW in Triton equals the reference: params and states to the bit, its sums to rounding."""

from __future__ import annotations

from nmkernels.dispatch import implementations
from python_tests.backends.adamw_suite import GpuAdamWSuite


class TestAgainstTheReference(GpuAdamWSuite):
    step = staticmethod(next(i.fn for i in implementations("nm_masked_adamw_") if i.backend == "triton"))
