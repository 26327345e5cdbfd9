"""The three sparse GEMMs against dense ones in float64."""

import pytest
import torch

from nmkernels.pattern import DtypeError, ShapeError
from nmkernels.reference import compress, linear, linear_dgrad, linear_wgrad, prune
from python_tests.each import each
from python_tests.reference.conftest import DTYPES

PATTERNS = [(2, 4), (1, 4), (2, 8), (1, 16), (3, 3), (1, 32)]


def close(got, want):
    """Within the rounding of one GEMM and one cast."""
    want = want.double()
    assert got.shape == want.shape
    eps = torch.finfo(got.dtype).eps
    accumulate = torch.finfo(torch.float64 if got.dtype == torch.float64 else torch.float32).eps * 200
    return (got.double() - want).abs().max() <= (eps + accumulate) * want.abs().max()


@each("n, m", PATTERNS)
@each("lead", [(), (1,), (5,), (2, 3)])
@each("dtype", DTYPES)
def test_fprop_and_dgrad(n, m, lead, dtype):
    torch.manual_seed(m)
    w, b = torch.randn(6, 96).to(dtype), torch.randn(6).to(dtype)
    x, g = torch.randn(*lead, 96).to(dtype), torch.randn(*lead, 6).to(dtype)
    packed, dense = compress(w, n, m), prune(w, n, m).double()
    assert close(linear(x, *packed, n, m, 96), x.double() @ dense.T)
    assert close(linear(x, *packed, n, m, 96, b), x.double() @ dense.T + b.double())
    assert close(linear_dgrad(g, *packed, n, m, 96), g.double() @ dense)
    assert linear(x, *packed, n, m, 96, b).dtype == dtype


@each("n, m", PATTERNS)
@each("tokens", [1, 95, 96])
@each("dtype", DTYPES)
def test_wgrad_with_a_padded_tail(n, m, tokens, dtype):
    torch.manual_seed(tokens)
    g, x = torch.randn(5, tokens).to(dtype), torch.randn(tokens, 7).to(dtype)
    padded = torch.nn.functional.pad(g, (0, -tokens % m))
    assert close(linear_wgrad(*compress(padded, n, m), n, m, tokens, x), prune(padded, n, m)[:, :tokens].double() @ x.double())


def test_low_precision_is_rounded_once():
    """(256 + 1) + 1 in bfloat16 steps would stay 256; in float32 it is 258."""
    w = torch.tensor([[256.0, 1.0, 0.0, 0.0]], dtype=torch.bfloat16)
    y = linear(torch.ones(1, 4, dtype=torch.bfloat16), *compress(w, 3, 4), 3, 4, 4, torch.tensor([1.0], dtype=torch.bfloat16))
    assert y.item() == 258


def test_empty_batches():
    packed = compress(torch.randn(6, 8), 2, 4)
    assert linear(torch.randn(0, 8), *packed, 2, 4, 8).shape == (0, 6)
    assert linear_dgrad(torch.randn(0, 6), *packed, 2, 4, 8).shape == (0, 8)
    empty = linear_wgrad(*compress(torch.randn(6, 0), 2, 4), 2, 4, 0, torch.randn(0, 3))
    assert torch.equal(empty, torch.zeros(6, 3))


def test_errors():
    packed, x = compress(torch.randn(6, 8), 2, 4), torch.randn(2, 8)
    with pytest.raises(ShapeError, match="linear: the input's last dimension is 7"):
        linear(x[:, :7], *packed, 2, 4, 8)
    with pytest.raises(DtypeError, match=r"linear: the input is torch.bfloat16"):
        linear(x.bfloat16(), *packed, 2, 4, 8)
    with pytest.raises(ShapeError, match="bias"):
        linear(x, *packed, 2, 4, 8, torch.ones(5))
    with pytest.raises(DtypeError, match="bias"):
        linear(x, *packed, 2, 4, 8, torch.ones(6).double())
    with pytest.raises(ShapeError, match="linear_dgrad: the gradient's last dimension is 8"):
        linear_dgrad(x, *packed, 2, 4, 8)
    with pytest.raises(ShapeError, match="number of tokens is 2"):
        linear_wgrad(*packed, 2, 4, 8, x)
    with pytest.raises(ShapeError, match=r"linear_wgrad.*\(tokens, in\)"):
        linear_wgrad(*packed, 2, 4, 8, torch.randn(2, 4, 3))


@each("activation", ["gelu", "silu", "relu2"])
@each("dtype", DTYPES)
def test_activation_precedes_the_rounding(activation, dtype):
    f = {"gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu, "relu2": lambda y: torch.relu(y) ** 2}[activation]
    w, x, b = torch.randn(6, 16).to(dtype), torch.randn(5, 16).to(dtype), torch.randn(6).to(dtype)
    y = linear(x, *compress(w, 2, 4), 2, 4, 16, b, activation)
    assert y.dtype == dtype
    assert close(y, f(x.double() @ prune(w, 2, 4).double().T + b.double()))


def test_a_rounded_sum_would_show():
    """squared ReLU of 1 + 2⁻⁸ in bfloat16: 1 from the rounded sum, 1 + 2⁻⁷ from the exact one."""
    w = torch.tensor([[1.0, 2.0**-8, 0.0, 0.0]], dtype=torch.bfloat16)
    y = linear(torch.ones(1, 4, dtype=torch.bfloat16), *compress(w, 2, 4), 2, 4, 4, None, "relu2")
    assert y.item() == 1 + 2**-7


def test_unknown_activation():
    with pytest.raises(ValueError, match="linear: activation 'tanh' is unknown; choose one of '', 'gelu', 'silu', 'relu2'"):
        linear(torch.ones(1, 4), *compress(torch.ones(1, 4), 2, 4), 2, 4, 4, None, "tanh")
