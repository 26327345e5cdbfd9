"""GEMMs with a compressed operand beyond the generic suite: patterns, ragged and strided operands, plans, splits, damaged indices."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from nmkernels import Pattern, reference
from nmkernels.backends.triton import linear as family
from nmkernels.backends.triton.launches import SHARED_KB, Tiling, by_words, candidates, plan, shared_bytes
from nmkernels.testing import assert_equal_bits, assert_no_worse, poison
from python_tests.backends.gemm_calls import unaligned
from python_tests.backends.kernel_suites import FewTokensSuite

BF16 = torch.bfloat16
DTYPES = [torch.float32, BF16, torch.float16]
WORDS = ["2:4", "1:4", "1:8", "2:8", "4:8", "1:16", "1:32", "4:32"]
OTHERS = ["3:5", "1:2", "5:8", "3:70"]
"""Patterns that are always expanded to memory."""
KINDS = {"linear": "fprop", "linear_dgrad": "dgrad", "linear_wgrad": "wgrad"}


def operand(pattern, rows, cols, dtype, device="cpu"):
    """A compressed operand whose last group may be partial."""
    p = Pattern(pattern)
    padded = torch.nn.functional.pad(torch.randn(rows, cols), (0, -cols % p.m)).to(dtype)
    return *(x.to(device) for x in reference.compress(padded, p.n, p.m)), p.n, p.m, cols


def judged(op, *args):
    """The Triton result of an op, no worse than the reference's; every byte of it written."""
    with poison():
        result = getattr(family, op)(*args)

    def reference_of(convert):
        host = [a.cpu() if isinstance(a, torch.Tensor) else a for a in args]
        if convert is torch.Tensor.double and op == "linear_wgrad":
            host = host[:6]  # whatever the dtype of the result
        return getattr(reference, op)(*(convert(a) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in host))

    assert_no_worse(result, reference_of(lambda a: a), reference_of(torch.Tensor.double), op)
    return result


@pytest.fixture
def planned(monkeypatch):
    """Sets the plan of the next calls."""

    def fix(p):
        monkeypatch.setattr(family, "choose", lambda *_args: p)

    return fix


@pytest.mark.quick(2)
@pytest.mark.parametrize("pattern", WORDS + OTHERS)
def test_gemms(pattern, device):
    for rows, cols, width, dtype in ((65, 130, 5, BF16), (20, 256, 17, BF16), (20, 130, 5, torch.float32), (20, 130, 9, torch.float16)):
        e = operand(pattern, rows, cols, dtype, device)
        x, g = (torch.randn(width, s).to(dtype).to(device) for s in (cols, rows))
        judged("linear", x, *e, torch.randn(rows).to(dtype).to(device))
        judged("linear_dgrad", g, *e)
        judged("linear_wgrad", *e, x.t().contiguous())
        judged("linear_wgrad", *e, x.t().contiguous(), torch.float32)


@pytest.mark.parametrize("op", KINDS)
@pytest.mark.parametrize(("pattern", "rows", "cols", "width", "tile"), [("2:4", 140, 264, 70, 32), ("1:8", 66, 512, 66, 64)])
def test_several_tiles_each_way(op, pattern, rows, cols, width, tile, device, planned):
    planned(Tiling("gemm", 64, tile, 64, 4, 2))
    e = operand(pattern, rows, cols, BF16, device)
    x = torch.randn({"linear_wgrad": (cols, width), "linear": (width, cols)}.get(op, (width, rows))).bfloat16().to(device)
    judged(op, *((*e, x) if op == "linear_wgrad" else (x, *e)))


def test_split_sums_are_added_in_order(device, planned):
    for splits, dtype in [(2, torch.float32), (3, BF16), (7, torch.float16)]:
        planned(Tiling("gemm", 64, 16, 128, 4, 2, splits))
        e = operand("2:4", 70, 520, dtype, device)
        x, bias = torch.randn(2, 6, 520).to(dtype).to(device), torch.randn(70).to(dtype).to(device)
        first = judged("linear", x, *e, bias, "gelu")
        assert_equal_bits(family.linear(x, *e, bias, "gelu"), first)
        judged("linear_wgrad", *e, x.flatten(0, 1).t())
        judged("linear_wgrad", *e, x.flatten(0, 1).t(), torch.float32)


@pytest.mark.parametrize("activation", ["", "gelu", "silu", "relu2"])
def test_epilogues(activation, device):
    for dtype in DTYPES:
        for tokens in (9, 65):
            e = operand("1:4", 40, 64, dtype, device)
            x = 3 * torch.randn(tokens, 64)
            for bias in (None, torch.randn(40).to(dtype).to(device)):
                judged("linear", x.to(dtype).to(device), *e, bias, activation)


def test_the_result_is_rounded_once(device):
    """As the reference's tests: a bfloat16 sum that was rounded first would lose 2⁻⁸."""
    w = torch.tensor([[1.0, 2.0**-8, 0.0, 0.0] + [0.0] * 28], dtype=BF16, device=device)
    values, indices = (x.to(device) for x in reference.compress(w.cpu(), 2, 4))
    y = family.linear(torch.ones(9, 32, dtype=BF16, device=device), values, indices, 2, 4, 32, None, "relu2")
    assert (y == 1 + 2**-7).all()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
        lambda x: torch.stack([x, x], 2)[..., 1],
        lambda x: x[:1].expand(x.shape),
        lambda x: torch.cat([x[:, :1], x], 1)[:, 1:],
        lambda x: torch.stack([x.unflatten(0, (-1, 3))] * 2, 1)[:, 0],
        lambda x: x.unflatten(0, (-1, 3)).transpose(0, 1),
    ],
    ids=["transposed", "columns", "every_second", "expanded", "unaligned", "leading_dimension", "transposed"],
)
@pytest.mark.parametrize("op", KINDS)
def test_any_strides(view, op, device):
    e = operand("2:4", 48, 64, torch.float16, device)
    x = view(torch.randn(12, 48 if op == "linear_dgrad" else 64).half().to(device))
    if op == "linear_wgrad":
        judged(op, *e, x.reshape(-1, 64).t() if x.dim() > 2 else x.t())
    else:
        assert judged(op, x, *e).is_contiguous()


@pytest.mark.parametrize("op", KINDS)
def test_unaligned_memory(op, device):
    """Then no integer holds the values of a group, and the operand is expanded to memory."""
    values, indices, *rest = operand("2:4", 48, 64, BF16, device)
    for e in ((unaligned(values), indices, *rest), (values, unaligned(indices), *rest)):
        x = torch.randn(8, 48 if op == "linear_dgrad" else 64).bfloat16().to(device)
        judged(op, *((*e, x.t()) if op == "linear_wgrad" else (x, *e)))


@pytest.mark.parametrize("op", KINDS)
@pytest.mark.parametrize("method", ["gemm", "scratch"])
def test_into_given_memory(method, op, device, planned):
    planned(Tiling(method))
    e = operand("2:4", 48, 66, BF16, device)
    x = torch.randn(2, 5, 48 if op == "linear_dgrad" else 66).bfloat16().to(device)
    if op == "linear_wgrad":
        args = (*e, x.flatten(0, 1).t().contiguous())
    else:
        args = (x, *e, torch.randn(48).bfloat16().to(device), "silu") if op == "linear" else (x, *e)
    result = judged(op, *args)
    out = torch.full_like(result, float("nan"))
    assert getattr(family, op)(*args, out=out) is out
    assert_equal_bits(out, result)


def test_sizes_of_nothing(device):
    e, no_rows, no_tokens = (operand("2:4", rows, cols, torch.float32, device) for rows, cols in ((6, 8), (0, 8), (6, 0)))
    assert family.linear(torch.randn(3, 0, 8, device=device), *e).shape == (3, 0, 6)
    assert family.linear(torch.randn(8, device=device), *e).shape == (6,)
    assert family.linear(torch.randn(5, 8, device=device), *no_rows).shape == (5, 0)
    assert_equal_bits(family.linear_dgrad(torch.randn(5, 0, device=device), *no_rows), torch.zeros(5, 8))
    assert_equal_bits(family.linear_wgrad(*no_tokens, torch.randn(0, 5, device=device)), torch.zeros(6, 5))
    bias = torch.randn(6, device=device)
    for tokens in (2, 5):
        assert_equal_bits(family.linear(torch.randn(tokens, 0, device=device), *no_tokens, bias), bias.expand(tokens, 6))


@pytest.mark.parametrize(
    ("pattern", "bad"), [("2:8", 0xFF), ("1:32", 0x20), ("1:32", 0x84), ("2:3", 0xFF), ("3:5", 0xFF), ("5:12", 0xFF), ("1:64", 0x40)]
)
def test_a_damaged_index_contributes_nothing(pattern, bad, device):
    """What is stored there is infinite, so that any use of it would show."""
    values, indices, n, m, cols = operand(pattern, 5, 16 * Pattern(pattern).m, torch.float32, device)
    broken = indices.clone()
    broken[2, 1] = bad
    g = torch.randn(7, 5, device=device)
    lost = slice(8 // Pattern(pattern).index_bits, 2 * 8 // Pattern(pattern).index_bits)
    without, values = values.clone(), values.clone()
    without[2, lost], values[2, lost] = 0.0, float("inf")
    for op, x in (("linear", torch.randn(7, cols, device=device)), ("linear", torch.randn(2, cols, device=device)), ("linear_dgrad", g)):
        fn = getattr(family, op)
        assert_equal_bits(fn(x, values, broken, n, m, cols), fn(x, without, indices, n, m, cols))
    x = torch.randn(cols, 7, device=device)
    assert_equal_bits(family.linear_wgrad(values, broken, n, m, cols, x), family.linear_wgrad(without, indices, n, m, cols, x))


def test_an_infinite_value_stays_in_its_place(device):
    """A stored inf times the zeros that masks put past the end must not become NaN elsewhere."""
    for pattern in ("2:4", "3:5"):
        values, indices, n, m, cols = operand(pattern, 6, 37, torch.float32, device)
        values[3] = float("inf")
        y = family.linear(torch.rand(9, cols, device=device) + 1, values, indices, n, m, cols)
        assert (y[:, 3] == float("inf")).all()
        assert y[:, [0, 1, 2, 4, 5]].isfinite().all()


SIZES = [(4096, 4096, 1), (4096, 4096, 16), (4096, 14336, 100), (11008, 4096, 700), (10, 30, 40), (4096, 4096, 8192)]


@pytest.mark.parametrize("kind", ["fprop", "dgrad", "wgrad"])
def test_plans_fit_the_kernels(kind):
    for dtype, capability, pattern, (rows, cols, width) in product(DTYPES, [90, 89, 0], map(Pattern, (*WORDS, *OTHERS)), SIZES):
        n, m = pattern.n, pattern.m
        options = candidates(kind, dtype, rows, cols, width, n, m, capability)
        assert options[0] == plan(kind, dtype, rows, cols, width, n, m, capability)
        assert len(set(options)) == len(options) and Tiling("scratch") in options
        for option in options:
            assert option.method in ("few", "gemm", "scratch")
            assert option.method != "few" or (kind == "fprop" and width <= 4)
            if option.method == "gemm":
                assert option.cols >= 32
                assert shared_bytes(option, kind, dtype, n, m) <= SHARED_KB.get(capability, 64) << 10
                assert option.splits == 1 or kind != "dgrad"
                assert by_words(dtype, n, m, cols) and option.cols * n // m * pattern.index_bits % 32 == 0


def test_what_the_heuristic_does():
    def method(width, n=2, m=4):
        return plan("fprop", BF16, 4096, 4096, width, n, m).method

    assert [method(width) for width in (2, 16, 511, 512, 8192)] == ["few", "gemm", "gemm", "scratch", "scratch"]
    assert [method(width, 3, 5) for width in (2, 16)] == ["few", "scratch"]
    assert plan("fprop", BF16, 4096, 4096, 16, 2, 4).splits > 1 == plan("fprop", BF16, 4096, 4096, 384, 2, 4).splits


class TestFewTokens(FewTokensSuite):
    pass
