"""chunked_sum: the order of its additions, bit by bit. distance: piece by piece what it is as a whole."""

import math

import torch

from nmkernels.reference import chunked_sum, distance
from python_tests.for_each import for_each


def looped(x):
    total = 0.0
    flat = x.double().flatten().tolist()
    for start in range(0, len(flat), 4096):
        partial = 0.0
        for value in flat[start : start + 4096]:
            partial += value
        total += partial
    return total


@for_each("size", [0, 1, 7, 4095, 4096, 4097, 8192, 20_001])
@for_each("dtype", [torch.float32, torch.float64, torch.bfloat16])
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


@for_each("chunk", [1, 7, 20, 1 << 24])
@for_each("dtype", [torch.float32, torch.bfloat16])
def test_distance_in_pieces(chunk, dtype, monkeypatch):
    monkeypatch.setattr("nmkernels.reference.common.WINDOW", chunk)
    y, z = torch.randn(11, 5).to(dtype), torch.randn(11, 5, dtype=torch.float64)
    for row in (0, 6, 10):
        z[row, row % 5] += 100
        assert distance(y, z) == (y.double() - z).abs().max().item()
        z[row, row % 5] -= 100


def test_distance_of_nan_and_of_nothing():
    y = torch.zeros(3, 4)
    y[1, 2] = torch.nan
    assert math.isnan(distance(y, torch.zeros(3, 4)))
    assert distance(y[:0], y[:0]) == distance(y[:, :0], y[:, :0]) == 0.0
