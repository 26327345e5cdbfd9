"""MaskedAdamW in Triton equals the reference: params and states to the bit, its sums to rounding."""

from __future__ import annotations

import pytest
import torch

from nmkernels.backends.triton import adamw
from nmkernels.dispatch import implementations
from nmkernels.testing import assert_equal_bits
from python_tests.backends.adamw_calls import copied, hyper, make, same_as_reference, seeded
from python_tests.backends.adamw_suite import AdamWSuite

TRITON = next(i for i in implementations("nm_masked_adamw_") if i.backend == "triton")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


class TestAgainstTheReference(AdamWSuite):
    step, module = staticmethod(TRITON.fn), adamw


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


@pytest.mark.parametrize("columns", [0, 1, 5000])
def test_partial_sums(device, columns, monkeypatch):
    """In one launch, and in slices as for many; a NaN among the largest wins."""
    monkeypatch.setattr(adamw, "SLICES", 4)
    partials = torch.randn(9, columns, dtype=torch.float64, generator=seeded(17)).abs()
    want = partials.sum(1)
    want[0], want[3], want[8] = 1.0, 0.0, partials[8].max() if columns else 0.0
    for few in (columns, columns - 1):
        for bad in (False, True) if columns > 1 else (False,):
            if bad:
                partials[8, columns // 3] = want[8] = float("nan")
            stats = torch.full((9,), 5.0, dtype=torch.float64, device=device)
            adamw.add_partials(partials.to(device), stats, None, 0b111110110, few=few)
            torch.testing.assert_close(stats.cpu(), want, rtol=1e-14, atol=0, equal_nan=True)
            adamw.add_partials(partials.to(device), stats, torch.ones(1, device=device), 0b111110110, few=few)
            assert not stats.any()


def test_takes_no_params(device):
    assert TRITON.supports([], [], [], [], [], [], [], hyper().to(device), 2, 4, False, False, False, False, None, None)[0]
