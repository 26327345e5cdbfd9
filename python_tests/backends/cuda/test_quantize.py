"""8-bit tensors in CUDA: bit-equal to the reference, straight, transposed and packed."""

from __future__ import annotations

import pytest
import torch

from nmkernels import reference, testing
from nmkernels.reference.quantize import LARGEST
from python_tests.conformance import moved
from python_tests.for_each import for_each

from .test_pack import edge

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(entry, device, *args):
    want, (got, *_) = getattr(reference, entry.op.removeprefix("nm_"))(*args), [entry.fn(*moved(args, device))]
    testing.assert_equal_bits(moved(got, "cpu"), want, f"{entry.op} {tuple(args[0].shape)} {args[0].dtype} {args[2:]}")


@pytest.mark.quick(1, per=("dtype",))
@for_each("dtype", list(LARGEST))
@for_each("source", DTYPES)
def test_rounding_both_ways(source, dtype, device, ours, poison):
    """Ragged shapes, several blocks, every kind of number; a scale of the tensor, and of each row of the result."""
    for rows, cols in ((3, 5), (64, 64), (130, 80), (1, 200), (200, 65)):
        x = edge(rows, cols, source)
        for transposed in (False, True):
            for scale in (torch.tensor(0.37), torch.rand(cols if transposed else rows) * 100):
                check(ours("nm_quantize"), device, x, scale, dtype, transposed)
    check(ours("nm_quantize"), device, edge(64, 48, source).t(), torch.tensor(1.0), dtype, True)


@for_each("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_number_is_rounded(dtype, device, ours):
    """Every bfloat16, and what a float32 has around the middle of two numbers."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(256, 256)
    check(ours("nm_quantize"), device, x, torch.tensor(1.0), dtype, False)
    near = torch.arange(-2, 3, dtype=torch.int32)
    bits = (torch.arange(0x36000000, 0x48000000, 1 << 18, dtype=torch.int32)[:, None] + near).view(torch.float32)
    check(ours("nm_quantize"), device, bits, torch.tensor(1.0), dtype, False)


@pytest.mark.quick(1, per=("dtype",))
@for_each("dtype", list(LARGEST))
@for_each("source", DTYPES)
def test_packing(source, dtype, device, ours, poison):
    for rows, cols in ((64, 128), (192, 256), (128, 640)):
        for scale in (torch.tensor(3.7), torch.rand(rows) * 10):
            check(ours("nm_quantize_pack"), device, edge(rows, cols, source), scale, dtype)
