"""nm_linear and nm_linear_wgrad by cuSPARSELt: what the library does, what torch does after it, and what is declined."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from nmkernels import Pattern, ops, reference, testing
from nmkernels.backends.cusparselt import blobs, context
from python_tests.backends.cusparselt.conftest import check, normal, packed, routes
from python_tests.for_each import for_each

DTYPES = (torch.bfloat16, torch.float16)
ACTIVATIONS = ("", "gelu", "silu", "relu2")


def the_problem():
    """What the library did of the only fprop."""
    (ready,) = (ready for kind, ready in routes().items() if kind[0] in DTYPES)
    return ready.problem


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogues(fake, ours, dtype, activation) -> None:
    for with_residual, with_bias in product((False, True), repeat=2):
        context.session_on(0).routes.clear()
        bias = normal(32, dtype=dtype, seed=3) if with_bias else None
        residual = normal(16, 32, dtype=dtype, seed=4) if with_residual else None
        check(ours, "nm_linear", normal(16, 64, dtype=dtype), *packed(dtype=dtype), bias, activation, residual)
        problem, fused = the_problem(), {"gelu": "gelu", "relu2": "relu"}.get(activation, "")
        assert (problem.bias, problem.residual, problem.activation) == (with_bias, with_residual and not activation, fused)


@pytest.mark.parametrize("refusal", [("gelu", 1), ("gelu", 2), ("no bias", 1)], ids=["gelu by tanh", "no gelu", "no bias"])
def test_an_epilogue_that_is_refused_or_another_is_left_to_torch(fake, ours, refusal) -> None:
    fake.set(*refusal)
    check(ours, "nm_linear", normal(16, 64), *packed(), normal(32, seed=3), "gelu", normal(16, 32, seed=4))
    problem = the_problem()
    assert problem.bias == (refusal[0] == "gelu") and not (problem.bias and problem.activation)


@pytest.mark.parametrize("when", [1, 2], ids=["made", "first run"])
def test_a_library_that_keeps_the_address_of_a_bias(fake, ours, when) -> None:
    fake.set("frozen bias", when)
    args = normal(16, 64), *packed()
    *others, bias = [normal(32, seed=seed) for seed in (3, 4, 5, 6)]  # all alive, at addresses of their own
    for other in others:
        check(ours, "nm_linear", *args, other)
    plans = fake.calls("MatmulPlanInit")
    for _ in range(3):
        check(ours, "nm_linear", *args, bias)
    assert fake.calls("MatmulPlanInit") == plans + 1, "the same address needs no new plan"


@for_each("pattern", ["2:4", "1:4", "2:8", "1:8", "1:16", "2:32"])
def test_every_pattern_that_is_also_2_of_4(fake, ours, pattern) -> None:
    check(ours, "nm_linear", normal(8, 64), *packed(pattern=pattern))


@pytest.mark.parametrize("layout", ["mma.sp", "wgmma.sp"])
def test_metadata_of_tensor_cores(fake, ours, layout) -> None:
    values, indices, *sizes = packed(64, 128)
    meta = reference.to_layout(indices, 128, layout)
    a = check(ours, "nm_linear", normal(8, 128), values, meta, *sizes)
    assert torch.equal(a, ours("nm_linear").fn(normal(8, 128), values, indices, *sizes))
    check(ours, "nm_linear_wgrad", values, meta, *sizes, normal(128, 24))


@for_each("tokens", [1, 3, 8, 13])
def test_tokens_are_padded(fake, ours, tokens) -> None:
    y = check(ours, "nm_linear", normal(tokens, 64), *packed(), normal(32, seed=3), "", normal(tokens, 32, seed=4))
    assert y.shape == (tokens, 32)


def test_leading_dimensions_strides_and_addresses(fake, ours) -> None:
    assert check(ours, "nm_linear", normal(2, 3, 64), *packed()).shape == (2, 3, 32)
    assert check(ours, "nm_linear", normal(64), *packed()).shape == (32,)
    assert ours("nm_linear").fn(normal(0, 64), *packed()).shape == (0, 32)
    check(ours, "nm_linear", normal(64, 8).t(), *packed())
    odd = normal(8 * 64 + 1)[1:].view(8, 64)
    assert odd.data_ptr() % 16
    check(ours, "nm_linear", odd, *packed(), normal(33)[1:], "", normal(8 * 32 + 1)[1:].view(8, 32))


def test_out(fake, ours, poison) -> None:
    def same(op, *args, out):
        assert check(ours, op, *args, out=out) is out

    for activation in ACTIVATIONS:
        same("nm_linear", normal(8, 64), *packed(), None, activation, out=torch.empty(8, 32, dtype=torch.bfloat16))
        same("nm_linear", normal(8, 64), *packed(), None, activation, out=torch.empty(32, 8, dtype=torch.bfloat16).t())
    same("nm_linear", normal(5, 64), *packed(), out=torch.empty(5, 32, dtype=torch.bfloat16))
    same("nm_linear_wgrad", *packed(), normal(64, 24), out=torch.empty(32, 24, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wgrad(fake, ours, dtype) -> None:
    g = ops.compress(normal(64, 32, dtype=dtype).t().contiguous(), "2:4")
    y = check(ours, "nm_linear_wgrad", g.values, g.indices, 2, 4, 64, normal(64, 48, dtype=dtype, seed=5))
    assert y.shape == (32, 48) and not blobs._entries, "gradients are not remembered"


def test_the_input_and_the_weight_stay_as_they_are(fake, ours) -> None:
    args = normal(8, 64), *packed(), normal(32), "relu2", normal(8, 32)
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    state = torch.get_rng_state()
    ours("nm_linear").fn(*args)
    for a, b in zip(args, before, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert torch.equal(torch.get_rng_state(), state), "checking an algorithm must not draw from the caller's generator"


@for_each(
    "dtype, rows, cols, pattern, reason",
    [
        (torch.float32, 32, 64, "2:4", "it multiplies float16 and bfloat16, and this call is in torch.float32"),
        (torch.bfloat16, 32, 64, "4:8", "at most 2 of every M, M a multiple of 4; not 4:8"),
        (torch.bfloat16, 32, 64, "1:2", "not 1:2"),
        (torch.bfloat16, 24, 64, "2:4", "rows and columns must be multiples of 16, not (24, 64)"),
        (torch.bfloat16, 32, 40, "2:4", "rows and columns must be multiples of 16, not (32, 40)"),
    ],
)
def test_what_is_declined(fake, ours, dtype, rows, cols, pattern, reason) -> None:
    p = Pattern(pattern)
    values, indices, *_ = packed(rows, cols, dtype)
    can, why = ours("nm_linear").supports(normal(8, cols, dtype=dtype), values, indices, p.n, p.m, cols)
    assert not can and reason in why


def test_odd_widths_and_sparse_tensors_are_declined(fake, ours) -> None:
    odd = ours("nm_linear_wgrad").supports(*packed(), normal(64, 12))
    assert odd == (False, "the columns of x must be a multiple of 8, not 12")
    assert "call .to_dense()" in ours("nm_linear").supports(normal(8, 64).to_sparse(), *packed())[1]


def test_cpu_tensors_do_not_open_the_library(ours, monkeypatch) -> None:
    monkeypatch.delenv("NMKERNELS_CUSPARSELT", raising=False)
    monkeypatch.setattr("nmkernels.capability.opened", lambda: pytest.fail("the library was opened"))
    assert ours("nm_linear").supports(normal(8, 64), *packed()) == (False, "it runs on GPUs, and one of these tensors is on cpu")


def test_through_the_dispatcher(fake, monkeypatch) -> None:
    c = ops.compress(normal(32, 64), "2:4")
    x = normal(8, 64)
    by_itself = ops.linear(x, c)
    assert not context._threads.sessions, "it is not chosen by itself"
    monkeypatch.setenv("NMKERNELS_BACKEND", "cusparselt")
    testing.assert_no_worse(ops.linear(x, c), by_itself, reference.linear(x.double(), c.values.double(), c.indices, 2, 4, 64))
    assert fake.calls("Matmul")
