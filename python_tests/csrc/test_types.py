"""16-bit floats by integer arithmetic: the same bits as torch's conversions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nmkernels.testing import assert_equal_bits

CODES = {torch.bfloat16: 1, torch.float16: 2}
every_dtype = pytest.mark.parametrize("dtype", CODES, ids=str)


def converted(core, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x`` rounded to ``dtype``, and that widened to float32 again, by the core."""
    narrow, wide = torch.empty(x.numel(), dtype=dtype), torch.empty(x.numel())
    core.round_trip(x.data_ptr(), CODES[dtype], x.numel(), narrow.data_ptr(), wide.data_ptr())
    return narrow, wide


@every_dtype
def test_every_16_bit_value_survives(core, dtype):
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    narrow, wide = converted(core, every.float(), dtype)
    assert_equal_bits(narrow, every)
    assert_equal_bits(wide, every.float())


@every_dtype
def test_random_bits_round_as_torch_does(core, dtype):
    gen = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**31), 2**31, (1 << 20,), generator=gen, dtype=torch.int64).to(torch.int32).view(torch.float32)
    narrow, wide = converted(core, x, dtype)
    assert_equal_bits(narrow, x.to(dtype))
    assert_equal_bits(wide, x.to(dtype).float())


@every_dtype
def test_halfway_values_and_their_neighbours_round_as_torch_does(core, dtype):
    """Between every two neighbours of the 16-bit type: the middle, exactly, and one float32 step to either side."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).double()
    bottom = every[every.isfinite()].unique()
    middle = ((bottom[1:] + bottom[:-1]) / 2).float()
    up, down = (torch.nextafter(middle, torch.tensor(s * float("inf"))) for s in (1, -1))
    for x in (middle, up, down):
        assert_equal_bits(converted(core, x.contiguous(), dtype)[0], x.to(dtype))


def test_overflow_and_the_smallest_numbers(core):
    x = torch.tensor([65519.996, 65520.0, -65520.0, 2.0**-24, 2.0**-25, 1.0001 * 2.0**-25, -(2.0**-25), 1e-45, -1e-45, 3.4e38, -3.4e38])
    expected = torch.tensor([65504.0, float("inf"), -float("inf"), 2.0**-24, 0.0, 2.0**-24, -0.0, 0.0, -0.0, float("inf"), -float("inf")])
    assert_equal_bits(converted(core, x, torch.float16)[0], expected.to(torch.float16))
    top = torch.tensor([torch.finfo(torch.float32).max, 3.3895e38])
    assert_equal_bits(converted(core, top, torch.bfloat16)[1], torch.tensor([float("inf"), 3.3895313892515355e38]))


@every_dtype
def test_a_signalling_nan_stays_a_nan(core, dtype):
    x = torch.tensor([0x7F800001, -0x7FFFFF, 0x7F80FFFF], dtype=torch.int32).view(torch.float32)
    assert x.isnan().all()
    narrow, wide = converted(core, x, dtype)
    assert narrow.isnan().all()
    assert wide.isnan().all()
