"""16-bit floats by integer arithmetic: the same bits as torch's conversions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nmkernels.testing import assert_equal_bits

CODES = {torch.bfloat16: 1, torch.float16: 2}
INF = float("inf")


def converted(core, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x`` rounded to ``dtype``, and that widened to float32 again, by the core."""
    narrow, wide = torch.empty(x.numel(), dtype=dtype), torch.empty(x.numel())
    core.round_trip(x.data_ptr(), CODES[dtype], x.numel(), narrow.data_ptr(), wide.data_ptr())
    return narrow, wide


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_rounds_as_torch_does(core, dtype):
    """Every value of the type, what lies halfway between two of them and one float32 step to either side, and random bits."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    bottom = every.double()[every.isfinite()].unique()
    middle = ((bottom[1:] + bottom[:-1]) / 2).float()
    up, down = (torch.nextafter(middle, torch.tensor(to)) for to in (INF, -INF))
    bits = torch.randint(-(2**31), 2**31, (1 << 20,), generator=torch.Generator().manual_seed(0))
    for x in (every.float(), middle, up, down, bits.to(torch.int32).view(torch.float32)):
        narrow, wide = converted(core, x.contiguous(), dtype)
        assert_equal_bits(narrow, x.to(dtype))
        assert_equal_bits(wide, x.to(dtype).float())


def test_overflow_and_the_smallest_numbers(core):
    x = torch.tensor([65519.996, 65520.0, -65520.0, 2.0**-24, 2.0**-25, 1.0001 * 2.0**-25, -(2.0**-25), 1e-45, -1e-45, 3.4e38, -3.4e38])
    expected = torch.tensor([65504.0, INF, -INF, 2.0**-24, 0.0, 2.0**-24, -0.0, 0.0, -0.0, INF, -INF])
    assert_equal_bits(converted(core, x, torch.float16)[0], expected.to(torch.float16))
    top = torch.tensor([torch.finfo(torch.float32).max, 3.3895e38])
    assert_equal_bits(converted(core, top, torch.bfloat16)[1], torch.tensor([INF, 3.3895313892515355e38]))


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_a_signalling_nan_stays_a_nan(core, dtype):
    x = torch.tensor([0x7F800001, -0x7FFFFF, 0x7F80FFFF], dtype=torch.int32).view(torch.float32)
    assert all(y.isnan().all() for y in converted(core, x, dtype))
