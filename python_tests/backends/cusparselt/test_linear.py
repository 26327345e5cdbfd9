"""nm_linear and nm_linear_wgrad by cuSPARSELt: what the library does, what torch does after it, and what is declined."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from nmkernels import Pattern, ops, reference, testing
from nmkernels.backends.cusparselt import context
from python_tests.backends.cusparselt.conftest import routes

DTYPES = (torch.bfloat16, torch.float16)
ACTIVATIONS = ("", "gelu", "silu", "relu2")


def operand(rows=32, cols=64, dtype=torch.bfloat16, pattern="2:4", seed=1):
    p, gen = Pattern(pattern), torch.Generator().manual_seed(seed)
    return reference.compress(torch.randn(rows, cols, generator=gen).to(dtype), p.n, p.m)


def normal(*shape, dtype=torch.bfloat16, seed=2):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(ours, op, *args, **options):
    """Runs ours, and compares it with what torch computes from the dense operands, in its dtype and in float64."""
    can, reason = ours(op).supports(*args)
    assert can, reason
    y = ours(op).fn(*args, **options)
    theirs, exact = (dense(op, dtype, *args) for dtype in (y.dtype, torch.float64))
    testing.assert_no_worse(y, theirs, exact)
    return y


def dense(op, dtype, *args):
    wide = [a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    run = reference.linear if op == "nm_linear" else reference.linear_wgrad
    # the reference rounds once; torch's own way, one op after the other, is what is allowed twice
    if dtype == torch.float64 or op != "nm_linear":
        return run(*wide)
    x, values, indices, n, m, cols, bias, activation, residual = (*wide, *(None, "", None)[len(wide) - 6 :])
    y = run(x, values, indices, n, m, cols, bias)
    y = reference.linear.__globals__["ACTIVATIONS"][activation](y)
    return y if residual is None else y + residual


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogues(fake, ours, dtype, activation) -> None:
    for with_residual, with_bias in product((False, True), repeat=2):
        context.here(0).routes.clear()
        bias = normal(32, dtype=dtype, seed=3) if with_bias else None
        residual = normal(16, 32, dtype=dtype, seed=4) if with_residual else None
        check(ours, "nm_linear", normal(16, 64, dtype=dtype), *operand(dtype=dtype), 2, 4, 64, bias, activation, residual)
        (route,) = (r for k, r in routes().items() if k[0] == dtype)
        assert route.bias == with_bias
        assert route.residual == (with_residual and not activation)
        fused = {"": "", "gelu": "gelu", "silu": "", "relu2": "relu"}[activation]
        assert route.ready.problem.activation == fused


def test_gelu_by_tanh_is_left_to_torch(fake, ours) -> None:
    fake.set("gelu", 1)
    check(ours, "nm_linear", normal(16, 64), *operand(), 2, 4, 64, None, "gelu")
    (route,) = (r for k, r in routes().items() if k[0] == torch.bfloat16)
    assert (route.ready.problem.activation, route.after) == ("", "gelu")


@pytest.mark.parametrize("refusal", [("gelu", 2), ("no bias", 1)])
def test_an_epilogue_that_is_refused_is_left_to_torch(fake, ours, refusal) -> None:
    fake.set(*refusal)
    check(ours, "nm_linear", normal(16, 64), *operand(), 2, 4, 64, normal(32, seed=3), "gelu", normal(16, 32, seed=4))
    (route,) = (r for k, r in routes().items() if k[0] == torch.bfloat16)
    assert route.ready.problem.bias == (refusal[0] == "gelu") and not route.whole


@pytest.mark.parametrize("when", [1, 2], ids=["made", "first run"])
def test_a_library_that_keeps_the_address_of_a_bias(fake, ours, when) -> None:
    fake.set("frozen bias", when)
    args = normal(16, 64), *operand(), 2, 4, 64
    *others, bias = [normal(32, seed=seed) for seed in (3, 4, 5, 6)]  # all alive, at addresses of their own
    for other in others:
        check(ours, "nm_linear", *args, other)
    plans = fake.calls("MatmulPlanInit")
    for _ in range(3):
        check(ours, "nm_linear", *args, bias)
    assert fake.calls("MatmulPlanInit") == plans + 1, "the same address needs no new plan"


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "2:8", "1:8", "1:16", "2:32"])
def test_every_pattern_that_is_also_2_of_4(fake, ours, pattern) -> None:
    p = Pattern(pattern)
    check(ours, "nm_linear", normal(8, 64), *operand(pattern=pattern), p.n, p.m, 64)


@pytest.mark.parametrize("layout", ["mma.sp", "wgmma.sp"])
def test_metadata_of_tensor_cores(fake, ours, layout) -> None:
    values, indices = operand(64, 128)
    meta = reference.to_layout(indices, 128, layout)
    a = check(ours, "nm_linear", normal(8, 128), values, meta, 2, 4, 128)
    assert torch.equal(a, ours("nm_linear").fn(normal(8, 128), values, indices, 2, 4, 128))
    check(ours, "nm_linear_wgrad", values, meta, 2, 4, 128, normal(128, 24))


@pytest.mark.parametrize("tokens", [1, 3, 8, 13])
def test_tokens_are_padded(fake, ours, tokens) -> None:
    y = check(ours, "nm_linear", normal(tokens, 64), *operand(), 2, 4, 64, normal(32, seed=3), "", normal(tokens, 32, seed=4))
    assert y.shape == (tokens, 32)


def test_leading_dimensions_strides_and_addresses(fake, ours) -> None:
    packed = operand()
    assert check(ours, "nm_linear", normal(2, 3, 64), *packed, 2, 4, 64).shape == (2, 3, 32)
    assert check(ours, "nm_linear", normal(64), *packed, 2, 4, 64).shape == (32,)
    assert ours("nm_linear").fn(normal(0, 64), *packed, 2, 4, 64).shape == (0, 32)
    check(ours, "nm_linear", normal(64, 8).t(), *packed, 2, 4, 64)
    odd = normal(8 * 64 + 1)[1:].view(8, 64)
    assert odd.data_ptr() % 16
    check(ours, "nm_linear", odd, *packed, 2, 4, 64, normal(33)[1:], "", normal(8 * 32 + 1)[1:].view(8, 32))


def test_out(fake, ours, poison) -> None:
    args = normal(8, 64), *operand(), 2, 4, 64
    for out in (torch.empty(8, 32, dtype=torch.bfloat16), torch.empty(32, 8, dtype=torch.bfloat16).t()):
        for activation in ACTIVATIONS:
            y = check(ours, "nm_linear", *args, None, activation, out=out)
            assert y is out
    x = normal(5, 64)
    out = torch.empty(5, 32, dtype=torch.bfloat16)
    assert check(ours, "nm_linear", x, *operand(), 2, 4, 64, out=out) is out
    dw = torch.empty(32, 24, dtype=torch.bfloat16)
    assert check(ours, "nm_linear_wgrad", *operand(), 2, 4, 64, normal(64, 24), out=dw) is dw


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wgrad(fake, ours, dtype) -> None:
    g = normal(64, 32, dtype=dtype)
    packed = ops.compress(g.t().contiguous(), "2:4")
    y = check(ours, "nm_linear_wgrad", packed.values, packed.indices, 2, 4, 64, normal(64, 48, dtype=dtype, seed=5))
    assert y.shape == (32, 48)


def test_the_input_and_the_weight_stay_as_they_are(fake, ours) -> None:
    args = normal(8, 64), *operand(), 2, 4, 64, normal(32), "relu2", normal(8, 32)
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    state = torch.get_rng_state()
    ours("nm_linear").fn(*args)
    for a, b in zip(args, before, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert torch.equal(torch.get_rng_state(), state), "checking an algorithm must not draw from the caller's generator"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"x": normal(8, 64, dtype=torch.float32)}, "it multiplies float16 and bfloat16, and this call is in torch.float32"),
        ({"n": 4, "m": 8}, "at most 2 of every M, M a multiple of 4; not 4:8"),
        ({"n": 1, "m": 2}, "not 1:2"),
        ({"values": normal(24, 32)}, "rows and columns must be multiples of 16, not (24, 64)"),
        ({"cols": 40, "x": normal(8, 40)}, "rows and columns must be multiples of 16, not (32, 40)"),
    ],
)
def test_what_is_declined(fake, ours, change, reason) -> None:
    values, indices = operand()
    call = {"x": normal(8, 64), "values": values, "indices": indices, "n": 2, "m": 4, "cols": 64, **change}
    can, why = ours("nm_linear").supports(*call.values())
    assert not can and reason in why


def test_without_a_library_nothing_is_opened_for_tensors_of_the_cpu(ours, monkeypatch) -> None:
    monkeypatch.delenv("NMKERNELS_CUSPARSELT", raising=False)
    monkeypatch.setattr("nmkernels.capability.opened", lambda: pytest.fail("the library was opened"))
    assert ours("nm_linear").supports(normal(8, 64), *operand(), 2, 4, 64) == (
        False,
        "it runs on GPUs, and one of these tensors is on cpu",
    )


def test_wgrad_declines_odd_widths(fake, ours) -> None:
    can, why = ours("nm_linear_wgrad").supports(*operand(), 2, 4, 64, normal(64, 12))
    assert not can and why == "the columns of x must be a multiple of 8, not 12"


def test_through_the_dispatcher(fake, monkeypatch) -> None:
    c = ops.compress(normal(32, 64), "2:4")
    x = normal(8, 64)
    by_itself = ops.linear(x, c)
    assert not context._threads.here, "it is not chosen by itself"
    monkeypatch.setenv("NMKERNELS_BACKEND", "cusparselt")
    testing.assert_no_worse(ops.linear(x, c), by_itself, reference.linear(x.double(), c.values.double(), c.indices, 2, 4, 64))
    assert fake.calls("Matmul")
