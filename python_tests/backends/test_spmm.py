"""GEMMs of many tokens with a compressed operand: as good as dense ones, under every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nmkernels import reference
from nmkernels.backends.cpu.core import core
from nmkernels.pattern import Pattern, ShapeError
from nmkernels.testing import assert_equal_bits, assert_no_worse, fill_poison
from python_tests.backends.gemm_calls import packed, unaligned
from python_tests.for_each import for_each

PATTERNS = ["2:4", "1:4", "4:4", "2:8", "1:8", "4:8", "1:16", "3:5", "7:12", "1:32", "1:256", "7:256", "200:256"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_pattern = for_each("text", PATTERNS)


def poisoned(x: Tensor) -> Tensor:
    return unaligned(fill_poison(torch.empty_like(x)))


def check(cpu, text: str, dtype: torch.dtype, rows: int, cols: int, tokens: int) -> None:
    p, gen = Pattern(text), torch.Generator().manual_seed(rows + cols + tokens)
    values, indices, w = packed(text, rows, cols, dtype, gen=gen)
    call = unaligned(values), indices, p.n, p.m, cols
    x, g = (unaligned(torch.randn(tokens, n, generator=gen).to(dtype)) for n in (cols, rows))
    bias = torch.randn(rows, generator=gen).to(dtype)
    for b in (None, bias):
        out, dense = poisoned(x.new_empty(tokens, rows)), torch.nn.functional.linear(x, w, b)
        assert cpu("nm_linear")(x, *call, b, out=out) is out
        assert_no_worse(out, dense, torch.nn.functional.linear(x.double(), w.double(), None if b is None else b.double()))
    out = poisoned(x)
    assert cpu("nm_linear_dgrad")(g, *call, out=out) is out
    assert_no_worse(out, g @ w, g.double() @ w.double())
    transposed = unaligned(x.t().contiguous())  # [cols, tokens]: the columns are now the tokens that wgrad sums over
    out = poisoned(transposed.new_empty(rows, tokens))
    assert cpu("nm_linear_wgrad")(*call, transposed, out=out) is out
    assert_no_worse(out, w @ transposed, w.double() @ transposed.double())
    wide = poisoned(out.float())
    assert cpu("nm_linear_wgrad")(*call, transposed, torch.float32, out=wide) is wide
    assert_no_worse(wide, w.float() @ transposed.float(), w.double() @ transposed.double())


@pytest.mark.quick(2)
@every_pattern
def test_as_good_as_dense(cpu, text):
    for dtype in DTYPES:
        for tokens in [1, 5, 17, 63, 64, 129]:
            check(cpu, text, dtype, 17, 768, tokens)


@pytest.mark.quick(2, per="cpu")
@every_pattern
def test_odd_sizes(cpu, text):
    for rows in [1, 3, 65]:
        for tokens in [0, 3, 300]:
            m = Pattern(text).m
            for cols in sorted({m, 2 * m - 1, 5 * m - 2, 5 * m}):
                check(cpu, text, torch.float32, rows, cols, tokens)


def test_a_long_sum_stays_exact(cpu):
    check(cpu, "2:4", torch.float32, 5, 11008, 40)


def test_empty_operands(cpu):
    for op in ["nm_linear", "nm_linear_dgrad", "nm_linear_wgrad"]:
        for rows, cols in ((0, 8), (6, 0), (0, 0)):
            values, indices = reference.compress(torch.randn(rows, cols), 2, 4)
            call = values, indices, 2, 4, cols
            if op == "nm_linear_wgrad":
                result, shape = cpu(op)(*call, torch.randn(cols, 3)), (rows, 3)
            else:
                result = cpu(op)(torch.randn(3, cols if op == "nm_linear" else rows), *call)
                shape = (3, rows if op == "nm_linear" else cols)
            assert torch.equal(result, torch.zeros(shape))


def test_damaged_indices_raise(cpu):
    for text in ["3:5", "2:8", "1:20", "200:255"]:
        p = Pattern(text)
        values, indices = reference.compress(torch.randn(9, 4 * p.m), p.n, p.m)
        indices[7, -1] = 255
        call, cols = (values, indices, p.n, p.m, 4 * p.m), 4 * p.m
        for op, args in (
            ("nm_linear", (torch.randn(20, cols), *call)),
            ("nm_linear_wgrad", (*call, torch.randn(cols, 20))),
            ("nm_linear_dgrad", (torch.randn(20, 9), *call)),
        ):
            with pytest.raises(ShapeError, match=f"does not exist in a group of {p.m}"):
                cpu(op)(*args)


def test_a_column_named_too_often_raises(cpu):
    values, indices = torch.ones(2000, 2), torch.zeros(2000, 1, dtype=torch.uint8)
    with pytest.raises(ShapeError, match="damaged"):
        cpu("nm_linear_dgrad")(torch.ones(20, 2000), values, indices, 2, 4, 4)


@for_each("tokens", [20, 1, 4, 9])
@for_each("junk", [9.0, float("inf"), float("nan")])
def test_what_is_stored_past_the_end_counts_for_nothing(cpu, tokens, junk):
    for dtype in DTYPES:
        values, indices = reference.compress(torch.tensor([[1.0, 0.0, 2.0, 7.0, 0.0, 9.0, 0.0, junk]], dtype=dtype), 2, 4)
        w = torch.tensor([[0.0, 0.0, 2.0, 7.0, 0.0, 9.0]], dtype=dtype)
        x = torch.ones(tokens, 6, dtype=dtype)
        assert_equal_bits(cpu("nm_linear")(x, values, indices, 2, 4, 6), x @ w.t())
        assert_equal_bits(cpu("nm_linear_dgrad")(x[:, :1], values, indices, 2, 4, 6), x[:, :1] @ w)
        assert_equal_bits(cpu("nm_linear_wgrad")(values, indices, 2, 4, 6, x.t()), w @ x.t())


def test_only_stored_weights_meet_what_is_not_finite(cpu):
    for dtype in DTYPES:
        if dtype == torch.bfloat16 and core().bf16_dots():
            continue  # zeros are multiplied too: test_cpu_bf16.py
        for bad in [float("nan"), float("inf"), -float("inf")]:
            w = torch.tensor([[1.0, 2.0, 0.0, 0.0], [0.0, 0.0, 3.0, 4.0], [0.0, 5.0, 6.0, 0.0]], dtype=dtype)
            call = (*reference.compress(w, 2, 4), 2, 4, 4)
            x = torch.ones(40, 4, dtype=dtype)
            x[7, 1] = bad
            y = cpu("nm_linear")(x, *call)
            assert torch.isfinite(y[:7]).all() and torch.isfinite(y[8:]).all()
            assert [bool(f) for f in torch.isfinite(y[7])] == [False, True, False]
            dw = cpu("nm_linear_wgrad")(*call, x.t())
            assert_equal_bits(dw, y.t())
            g = torch.ones(40, 3, dtype=dtype)
            g[7, 0] = bad
            dx = cpu("nm_linear_dgrad")(g, *call)
            assert [bool(f) for f in torch.isfinite(dx[7])] == [False, False, True, True]


@for_each("text, tokens", [("2:4", 700), ("1:8", 700), ("3:5", 700), ("2:4", 5)])
def test_same_bits_on_any_number_of_threads(cpu, on_threads, text, tokens):
    p, gen = Pattern(text), torch.Generator().manual_seed(3)
    values, indices, _ = packed(text, 600, 40 * p.m, gen=gen)
    x, g = torch.randn(tokens, 40 * p.m, generator=gen), torch.randn(tokens, 600, generator=gen)
    call = (values, indices, p.n, p.m, 40 * p.m)
    gemms = (("nm_linear", (x, *call)), ("nm_linear_dgrad", (g, *call)), ("nm_linear_wgrad", (*call, x.t())))
    one, two, three = on_threads(lambda: [cpu(op)(*args) for op, args in gemms])
    assert_equal_bits([two, three], [one, one])
