"""FP8: values on the grid, the scale of the present range, the odd tensors; and the way over sparse tensor cores, without them."""

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.autograd import fp8
from nmkernels.autograd.fp8 import DTYPES, SCHEMES, operands, quantize
from nmkernels.recipes import SSTE
from nmkernels.reference.quantize import LARGEST
from python_tests.for_each import for_each


def test_values_are_fp8_numbers_of_the_right_range():
    for kind in DTYPES:
        for dtype in [torch.float16, torch.bfloat16, torch.float32, torch.float64]:
            for size in [1e-6, 1.0, 1e4]:
                x = (torch.randn(64, 8) * size).to(dtype)
                values, step = quantize(x, kind)
                assert torch.equal(values.to(DTYPES[kind]).to(values.dtype), values) and values.abs().max() == LARGEST[DTYPES[kind]]
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


def step(model, x, g):
    """Output and gradients of one call; of the same random numbers each time."""
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(g)
    return y.detach(), x.grad, *(p.grad for p in model.parameters())


@for_each("scheme, mvue", [("paper", "exact"), ("hybrid", "exact"), ("paper", None)])
def test_sparse_tensor_cores_get_the_operands_that_are_emulated(scheme, mvue, monkeypatch):
    """In fp32 the definition of their GEMM gives what the emulation gives, but for the order of a sum."""
    model = nn.Sequential(nn.Linear(256, 64))
    nm.sparsify_(model, SSTE(fp8=scheme, mvue=mvue, seed=1))
    x, g = torch.randn(2, 64, 256), torch.randn(2, 64, 64)
    want, called = step(model, x, g), []

    def counted(*args):
        called.append((*(str(args[i].dtype)[13:17] for i in (0, 2)), args[7]))
        return original(*args)

    original = fp8.nm_linear_quantized
    with monkeypatch.context() as patch:
        patch.setattr(fp8, "_multiplies", lambda *_: True)
        patch.setattr(fp8, "nm_linear_quantized", counted)
        got = step(model, x, g)
    other = "e5m2" if scheme == "paper" else "e4m3"
    assert called == [("e4m3", "e4m3", False), *([(other, "e5m2", True)] if mvue else [])]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tokens", "inputs", "outputs", "dtype"), [
    (0, 256, 64, torch.float32), (8, 64, 64, torch.float32), (8, 256, 32, torch.float32), (8, 256, 64, torch.float64),
])  # fmt: skip
def test_other_sizes_are_emulated(tokens, inputs, outputs, dtype, monkeypatch):
    monkeypatch.setattr(fp8, "_multiplies", lambda *_: True)
    monkeypatch.setattr(fp8, "nm_linear_quantized", None)
    model = nn.Sequential(nn.Linear(inputs, outputs, dtype=dtype))
    nm.sparsify_(model, SSTE(fp8="paper"))
    step(model, torch.randn(tokens, inputs, dtype=dtype), torch.randn(tokens, outputs, dtype=dtype))


def test_without_a_gpu_all_is_emulated():
    for scheme in SCHEMES:
        for role in ("fprop", "wgrad"):
            assert not fp8.multiplies(scheme, role, 64, 128, 8, torch.randn(1))
