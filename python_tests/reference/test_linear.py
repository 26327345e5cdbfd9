"""The three sparse GEMMs against dense ones in float64."""

import torch
import torch.nn.functional as F

from nmkernels.reference import compress, linear, linear_dgrad, linear_wgrad, prune
from python_tests.for_each import for_each
from python_tests.reference.conftest import DTYPES

PATTERNS = [(2, 4), (1, 4), (2, 8), (1, 16), (3, 3), (1, 32)]


def close(got, want):
    """Within the rounding of one GEMM and one cast."""
    want = want.double()
    assert got.shape == want.shape and got.dtype in DTYPES
    eps = torch.finfo(got.dtype).eps
    accumulate = torch.finfo(torch.float64 if got.dtype == torch.float64 else torch.float32).eps * 200
    return (got.double() - want).abs().max() <= (eps + accumulate) * want.abs().max()


@for_each("n, m", PATTERNS)
@for_each("lead, activation", [((), ""), ((1,), "gelu"), ((5,), "silu"), ((2, 3), "relu2")])
@for_each("dtype", DTYPES)
def test_fprop_and_dgrad(n, m, lead, activation, dtype):
    f = {"": lambda y: y, "gelu": F.gelu, "silu": F.silu, "relu2": lambda y: torch.relu(y) ** 2}[activation]
    w, b, r = torch.randn(6, 96).to(dtype), torch.randn(6).to(dtype), torch.randn(*lead, 6).to(dtype)
    x, g = torch.randn(*lead, 96).to(dtype), torch.randn(*lead, 6).to(dtype)
    packed, dense = compress(w, n, m), prune(w, n, m).double()
    assert close(linear(x, *packed, n, m, 96), x.double() @ dense.T)
    assert close(linear(x, *packed, n, m, 96, b, activation, r), f(x.double() @ dense.T + b.double()) + r.double())
    assert close(linear_dgrad(g, *packed, n, m, 96), g.double() @ dense)


@for_each("n, m", PATTERNS)
@for_each("tokens", [1, 95, 96])
@for_each("dtype", DTYPES)
def test_wgrad_with_a_padded_tail(n, m, tokens, dtype):
    g, x = torch.randn(5, tokens).to(dtype), torch.randn(tokens, 7).to(dtype)
    padded = torch.nn.functional.pad(g, (0, -tokens % m))
    assert close(linear_wgrad(*compress(padded, n, m), n, m, tokens, x), prune(padded, n, m)[:, :tokens].double() @ x.double())


def test_low_precision_is_rounded_once():
    """(256 + 1) + 1 in bfloat16 steps would stay 256, the squared ReLU of a rounded 1 + 2⁻⁸ would be 1 and not 1 + 2⁻⁷."""
    for row, bias, activation, want in (([256.0, 1.0, 0.0, 0.0], 1.0, "", 258), ([1.0, 2.0**-8, 0.0, 0.0], 0.0, "relu2", 1 + 2**-7)):
        packed, b = compress(torch.tensor([row], dtype=torch.bfloat16), 3, 4), torch.tensor([bias], dtype=torch.bfloat16)
        assert linear(torch.ones(1, 4, dtype=torch.bfloat16), *packed, 3, 4, 4, b, activation).item() == want
