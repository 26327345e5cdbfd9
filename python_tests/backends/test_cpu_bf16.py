"""The bf16 GEMMs from weights that are expanded inside the cache: as good as dense ones, under every instruction set.

Only processors that multiply bf16 take them by themselves; they compute the same everywhere.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nmkernels import reference
from nmkernels.backends.cpu import linear as module
from nmkernels.backends.cpu.core import core
from nmkernels.pattern import Pattern, ShapeError
from nmkernels.testing import assert_equal_bits, assert_no_worse, fill_poison
from python_tests.backends.gemm_calls import packed, unaligned
from python_tests.for_each import for_each

BF16 = torch.bfloat16
PATTERNS = ["2:4", "1:4", "4:4", "2:8", "1:8", "4:8", "1:16", "3:5", "7:12", "1:32", "1:256", "200:256"]


class Dots:
    """The core, whose GEMMs are those that processors take which multiply bf16."""

    def __init__(self) -> None:
        self.core = core()

    def __getattr__(self, name):
        return getattr(self.core, name)

    def linear(self, x, values, indices, bias, y, dtype, tokens, rows, cols, n, m, threads):
        call = self.core.SpmmCall(values, indices, rows, cols, tokens, x, 1, cols, bias, y, 1, rows, False)
        return self.core.bf16_spmm(call, n, m, threads)

    def spmm(self, call, dtype, n, m, threads):
        return self.core.bf16_spmm(call, n, m, threads)

    def spmm_transposed(self, call, dtype, n, m, threads):
        return self.core.bf16_spmm_transposed(call, n, m, threads)


@pytest.fixture(autouse=True)
def _in_tiles(monkeypatch):
    """Under every instruction set, also where the fp32 kernels would be taken."""
    monkeypatch.setattr(module, "core", Dots)


def poisoned(*shape: int) -> Tensor:
    return unaligned(fill_poison(torch.empty(*shape, dtype=BF16)))


def check(cpu, text: str, rows: int, cols: int, tokens: int) -> None:
    p, gen = Pattern(text), torch.Generator().manual_seed(rows + cols + tokens)
    values, indices, w = packed(text, rows, cols, BF16, gen=gen)
    call = unaligned(values), indices, p.n, p.m, cols
    x, g = (unaligned(torch.randn(tokens, n, generator=gen).to(BF16)) for n in (cols, rows))
    bias = torch.randn(rows, generator=gen).to(BF16)
    for b in (None, bias):
        out, dense = poisoned(tokens, rows), torch.nn.functional.linear(x, w, b)
        assert cpu("nm_linear")(x, *call, b, out=out) is out
        assert_no_worse(out, dense, torch.nn.functional.linear(x.double(), w.double(), None if b is None else b.double()))
    out = poisoned(tokens, cols)
    assert cpu("nm_linear_dgrad")(g, *call, out=out) is out
    assert_no_worse(out, g @ w, g.double() @ w.double())
    transposed = unaligned(x.t().contiguous())
    out = poisoned(rows, tokens)
    assert cpu("nm_linear_wgrad")(*call, transposed, out=out) is out
    assert_no_worse(out, w @ transposed, w.double() @ transposed.double())
    wide = unaligned(fill_poison(torch.empty(rows, tokens)))
    assert cpu("nm_linear_wgrad")(*call, transposed, torch.float32, out=wide) is wide
    assert_equal_bits(wide.to(BF16), out, "the same sums, rounded later")
    # of so many terms, added in any order (products of bf16 are exact); torch adds in blocks, with smaller errors
    bound = p.kept(cols) * 2**-24 * (w.double().abs() @ transposed.double().abs())
    assert ((wide.double() - w.double() @ transposed.double()).abs() <= bound).all()


@pytest.mark.quick(2)
@for_each("text", PATTERNS)
def test_as_good_as_dense(cpu, text):
    for tokens in [1, 2, 5, 8, 9, 17, 33, 64, 65]:
        check(cpu, text, 49, 768, tokens)


@for_each("text", PATTERNS)
@pytest.mark.slow
def test_odd_sizes(cpu, text):
    m = Pattern(text).m
    for rows in [1, 3, 65]:
        for tokens in [0, 1, 3, 40]:
            for cols in sorted({m, 2 * m - 1, 5 * m - 2, 5 * m, 1024 // m * m + 5}):
                check(cpu, text, rows, cols, tokens)


@for_each("text", ["2:4", "1:8", "3:5"])
@pytest.mark.slow
def test_several_blocks_of_everything(cpu, text):
    for rows, cols, tokens in [(700, 1100, 70), (300, 64, 1100), (40, 9000, 40), (33, 6000, 3)]:
        check(cpu, text, rows, cols, tokens)


def test_empty_operands(cpu):
    for rows, cols in ((0, 8), (6, 0), (0, 0)):
        values, indices = reference.compress(torch.randn(rows, cols, dtype=BF16), 2, 4)
        call = values, indices, 2, 4, cols
        assert torch.equal(cpu("nm_linear")(torch.randn(3, cols).to(BF16), *call), torch.zeros(3, rows, dtype=BF16))
        assert torch.equal(cpu("nm_linear_dgrad")(torch.randn(3, rows).to(BF16), *call), torch.zeros(3, cols, dtype=BF16))
        assert torch.equal(cpu("nm_linear_wgrad")(*call, torch.randn(cols, 3).to(BF16)), torch.zeros(rows, 3, dtype=BF16))
        bias = torch.randn(rows).to(BF16)
        assert_equal_bits(cpu("nm_linear")(torch.zeros(3, cols, dtype=BF16), *call, bias), bias.expand(3, rows))


def test_damaged_indices_raise(cpu):
    for text in ["3:5", "1:8", "2:8", "4:8", "1:20", "200:255"]:
        p, tokens = Pattern(text), 20
        for groups in (4, 70):
            cols = groups * p.m
            values, indices = reference.compress(torch.randn(9, cols).to(BF16), p.n, p.m)
            indices[7, -1] = 255
            call = values, indices, p.n, p.m, cols
            for op, args in (
                ("nm_linear", (torch.randn(1, cols).to(BF16), *call)),
                ("nm_linear", (torch.randn(tokens, cols).to(BF16), *call)),
                ("nm_linear_wgrad", (*call, torch.randn(cols, tokens).to(BF16))),
                ("nm_linear_dgrad", (torch.randn(tokens, 9).to(BF16), *call)),
            ):
                with pytest.raises(ShapeError, match=f"does not exist in a group of {p.m}"):
                    cpu(op)(*args)


@for_each("text", ["2:4", "2:8", "4:8", "3:5"])
def test_any_order_within_a_group(cpu, text):
    p, gen = Pattern(text), torch.Generator().manual_seed(5)
    rows, cols = 9, 1024 // p.m * p.m
    values, indices, w = packed(text, rows, cols, BF16, gen=gen)
    bits = 2 if p.m <= 4 else 4
    mask = (1 << bits) - 1
    positions = torch.stack([(indices >> shift) & mask for shift in range(0, 8, bits)], dim=-1).flatten(1)[:, : values.shape[1]]
    turned = positions.unflatten(1, (-1, p.n)).flip(-1).flatten(1).to(torch.int64)
    shifts = torch.arange(turned.shape[1]) % (8 // bits) * bits
    odd = torch.zeros_like(indices, dtype=torch.int64).index_add_(1, torch.arange(turned.shape[1]) // (8 // bits), turned << shifts)
    call = values.unflatten(1, (-1, p.n)).flip(-1).flatten(1).contiguous(), odd.to(torch.uint8), p.n, p.m, cols
    for tokens in (1, 3, 40):
        x = torch.randn(tokens, cols, generator=gen).to(BF16)
        assert_no_worse(cpu("nm_linear")(x, *call), x @ w.t(), x.double() @ w.double().t())
        g = torch.randn(tokens, rows, generator=gen).to(BF16)
        assert_no_worse(cpu("nm_linear_dgrad")(g, *call), g @ w, g.double() @ w.double())


@for_each("tokens", [1, 4, 9, 20])
@for_each("junk", [9.0, float("inf"), float("nan")])
def test_what_is_stored_past_the_end_counts_for_nothing(cpu, tokens, junk):
    values, indices = reference.compress(torch.tensor([[1.0, 0.0, 2.0, 7.0, 0.0, 9.0, 0.0, junk]], dtype=BF16), 2, 4)
    w = torch.tensor([[0.0, 0.0, 2.0, 7.0, 0.0, 9.0]], dtype=BF16)
    x = torch.ones(tokens, 6, dtype=BF16)
    assert_equal_bits(cpu("nm_linear")(x, values, indices, 2, 4, 6), x @ w.t())
    assert_equal_bits(cpu("nm_linear_dgrad")(x[:, :1], values, indices, 2, 4, 6), x[:, :1] @ w)
    assert_equal_bits(cpu("nm_linear_wgrad")(values, indices, 2, 4, 6, x.t()), w @ x.t())


@for_each("tokens", [1, 5, 40])
def test_what_is_not_finite_stays_with_its_token(cpu, tokens):
    values, indices, _ = packed("2:4", 20, 70, BF16)
    x = torch.ones(tokens, 70, dtype=BF16)
    x[tokens // 2, 69] = float("nan")
    finite = torch.isfinite(cpu("nm_linear")(x, values, indices, 2, 4, 70)).all(1)
    assert [bool(f) for f in finite] == [t != tokens // 2 for t in range(tokens)]


@for_each("text, tokens", [("2:4", 700), ("3:5", 700), ("2:4", 5), ("2:4", 1), ("1:8", 40)])
def test_same_bits_on_any_number_of_threads(cpu, on_threads, text, tokens):
    p, gen = Pattern(text), torch.Generator().manual_seed(3)
    values, indices, _ = packed(text, 600, 40 * p.m, BF16, gen=gen)
    x, g = (torch.randn(tokens, n, generator=gen).to(BF16) for n in (40 * p.m, 600))
    call = (values, indices, p.n, p.m, 40 * p.m)
    gemms = (("nm_linear", (x, *call)), ("nm_linear_dgrad", (g, *call)), ("nm_linear_wgrad", (*call, x.t())))
    one, two, three = on_threads(lambda: [cpu(op)(*args) for op, args in gemms])
    assert_equal_bits([two, three], [one, one])
