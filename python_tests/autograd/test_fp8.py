"""Emulated FP8: values on the grid, the scale of the present range, and the odd tensors."""

import torch

from nmkernels.autograd.fp8 import FORMATS, SCHEMES, operands, quantize


def test_values_are_fp8_numbers_of_the_right_range():
    for kind in FORMATS:
        for dtype in [torch.float16, torch.bfloat16, torch.float32, torch.float64]:
            for size in [1e-6, 1.0, 1e4]:
                x = (torch.randn(64, 8) * size).to(dtype)
                values, step = quantize(x, kind)
                fp8, largest = FORMATS[kind]
                assert torch.equal(values.to(fp8).to(values.dtype), values) and values.abs().max() == largest
                assert values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
                bits = 3 if kind == "e4m3" else 2
                error = (values * step - x.to(values.dtype)).abs()
                assert (error <= 2.0 ** -(bits + 1) * x.to(values.dtype).abs() * (1 + 1e-6) + step * 2.0**-9).all()


def test_zeros_empty_and_denormals():
    for x in (torch.zeros(3, 4), torch.zeros(0, 4), torch.full((2, 2), 1e-45)):
        values, step = quantize(x, "e4m3")
        assert values.shape == x.shape and torch.isfinite(values).all() and torch.isfinite(step)


def test_what_is_not_finite_is_not_hidden():
    for bad in [torch.inf, -torch.inf, torch.nan]:
        values, step = quantize(torch.tensor([1.0, bad, 2.0]), "e5m2")
        assert not torch.isfinite((values * step)[1])


def test_gemm_is_close_to_the_exact_one():
    for scheme in SCHEMES:
        for role in ["fprop", "dgrad", "wgrad"]:
            a, b = torch.randn(32, 64), torch.randn(64, 32)
            p, q, step = operands(scheme, role, a, b)
            error = ((p @ q) * step - a @ b).norm() / (a @ b).norm()
            assert 0.005 < error < 0.1
