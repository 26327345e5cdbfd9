"""cases() holds what it promises."""

from __future__ import annotations

import torch

from nmkernels import testing
from python_tests.for_each import for_each


@for_each("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@for_each("pattern", ["2:4", "1:1", "3:5", "8:256"])
def test_cases(pattern: str, dtype: torch.dtype) -> None:
    m = int(pattern.split(":")[1])
    made = {c.id: c.x for c in testing.cases(pattern, dtype)}
    assert len(made) == len(testing.cases(pattern, dtype))
    assert all(x.dtype == dtype and x.shape[-1] % m == 0 for x in made.values())
    testing.assert_equal_bits(made, {c.id: c.x for c in testing.cases(pattern, dtype)})
    zeros = made["signed_zeros"]
    assert (zeros == 0).all() and 0 < zeros.signbit().sum() < zeros.numel()
    denormal = made["denormal"][made["denormal"] != 0].abs()
    assert (denormal < torch.finfo(dtype).smallest_normal).any()
    assert made["nan"].isnan().any() and not made["nan"].isnan().all() and made["all_nan"].isnan().all()
    assert made["infinite"].isinf().any() and made["extreme"].isfinite().all()
    assert made["one_group"].shape == (m,) and made["three_dims"].dim() == 3
    assert made["no_rows"].numel() == made["no_columns"].numel() == 0
    for name in ("transposed", "sliced_rows", "sliced_columns", "strided_columns", "expanded_rows"):
        assert not made[name].is_contiguous(), name
    assert made["expanded_columns"].stride(-1) == 0 and made["offset"].storage_offset() == 1
