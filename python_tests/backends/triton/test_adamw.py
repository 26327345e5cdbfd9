"""MaskedAdamW in Triton equals the reference: params and states to the bit, its sums to rounding."""

from __future__ import annotations

import torch

from nmkernels.dispatch import implementations
from nmkernels.testing import assert_equal_bits
from python_tests.backends.adamw_calls import copied, hyper, make, same_as_reference, seeded
from python_tests.backends.adamw_suite import GpuAdamWSuite

TRITON = next(i for i in implementations("nm_masked_adamw_") if i.backend == "triton")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


class TestAgainstTheReference(GpuAdamWSuite):
    step = staticmethod(TRITON.fn)


def test_many_params_twice(device):
    """40 params of mixed sizes, some unaligned, transposed or in half precision: the same bits in every run."""
    shapes = [(8 * (i % 5 + 1),) if i % 3 else (i % 7 + 1, 16) for i in range(39)]
    call, h = make(seeded(10), *shapes, (40, 64), out=BF16), hyper().to(device)
    ours = copied(call, device)
    first = same_as_reference(TRITON.fn, ours, call, hyper(), 2, 4, geometric=True)
    again = copied(call, device)
    stats = TRITON.fn(*again.values(), h, 2, 4, False, False, False, True, None, None)
    assert_equal_bits(stats.cpu(), first)
    assert_equal_bits(again, ours)


def test_takes_no_params(device):
    assert TRITON.supports([], [], [], [], [], [], [], hyper().to(device), 2, 4, False, False, False, False, None, None)[0]
