"""chunked_sum: the order of its additions, bit by bit."""

import torch

from nmkernels.reference import chunked_sum
from python_tests.each import each


def looped(x):
    total = 0.0
    flat = x.double().flatten().tolist()
    for start in range(0, len(flat), 4096):
        partial = 0.0
        for value in flat[start : start + 4096]:
            partial += value
        total += partial
    return total


@each("size", [0, 1, 7, 4095, 4096, 4097, 8192, 20_001])
@each("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_order_of_additions(size, dtype):
    x = torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64) * 10.0 ** torch.linspace(-9, 9, size).double()
    x = x.to(dtype)
    got = chunked_sum(x)
    assert got.dtype == torch.float64 and got.shape == () and got.item() == looped(x)


def test_row_major_order_whatever_the_strides():
    x = (torch.randn(130, 70, dtype=torch.float64) * torch.logspace(-20, 20, 70, dtype=torch.float64)).T
    assert chunked_sum(x).item() == looped(x.contiguous()) == chunked_sum(x.contiguous()).item()


def test_nan_and_infinity_show():
    assert chunked_sum(torch.tensor([1.0, float("nan")])).isnan()
    assert chunked_sum(torch.tensor([1.0, -float("inf")])).item() == -float("inf")
