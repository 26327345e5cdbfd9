"""GEMMs of few and of many tokens with a compressed operand: as good as dense ones, under every instruction set.

By the kernels that the core chooses, and in bf16 from weights that are expanded inside the cache, which only processors that multiply bf16
take by themselves; they compute the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nmkernels import reference
from nmkernels.backends.cpu import linear as module
from nmkernels.backends.cpu.core import core
from nmkernels.pattern import Pattern, ShapeError
from nmkernels.reference import pack_indices
from nmkernels.reference.compress import unpack_indices
from nmkernels.testing import assert_equal_bits, fill_poison
from python_tests.backends.gemm_calls import as_good_as_dense, damaged, inputs, packed, unaligned
from python_tests.backends.kernel_suites import FewTokensSuite
from python_tests.for_each import for_each

BF16 = torch.bfloat16
PATTERNS = ["2:4", "1:4", "4:4", "2:8", "1:8", "4:8", "1:16", "3:5", "7:12", "1:32", "1:256", "7:256", "200:256"]
FEW = ["2:4", "1:4", "2:8", "1:8", "4:8", "1:16", "1:32", "1:1", "1:2", "3:5", "4:4", "5:16", "2:32", "7:64", "200:256"]
DTYPES = [torch.float32, BF16, torch.float16]
every_pattern = for_each("text", PATTERNS)
every_dtype = for_each("dtype", DTYPES)


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


class Gemms(NamedTuple):
    """``run("nm_linear")`` and the dtypes that it multiplies; whether in tiles inside the cache."""

    run: Callable[[str], Callable[..., Any]]
    dtypes: list[torch.dtype]
    tiles: bool


@pytest.fixture(params=["chosen", "tiles"])
def gemms(request, cpu, monkeypatch):
    tiles = request.param == "tiles"
    if tiles:
        monkeypatch.setattr(module, "core", Dots)
    return Gemms(cpu, [BF16] if tiles else DTYPES, tiles)


chosen = pytest.mark.parametrize("gemms", ["chosen"], indirect=True)
in_tiles = pytest.mark.parametrize("gemms", ["tiles"], indirect=True)


def into(op: Callable[..., Any], args: tuple[Any, ...], *shape: int, dtype: torch.dtype) -> Tensor:
    """The result of an op in unaligned memory, every element of it written."""
    out = unaligned(fill_poison(torch.empty(*shape, dtype=dtype)))
    assert op(*args, out=out) is out
    return out


def check(gemms: Gemms, text: str, dtype: torch.dtype, rows: int, cols: int, tokens: int) -> None:
    p, gen = Pattern(text), torch.Generator().manual_seed(rows + cols + tokens)
    values, indices, w = packed(text, rows, cols, dtype, gen=gen)
    call = unaligned(values), indices, p.n, p.m, cols
    x, g = (unaligned(torch.randn(tokens, n, generator=gen).to(dtype)) for n in (cols, rows))
    for b in (None, torch.randn(rows, generator=gen).to(dtype)):
        y = into(gemms.run("nm_linear"), (x, *call, b), tokens, rows, dtype=dtype)
        as_good_as_dense(y, w, x, b)
    dx = into(gemms.run("nm_linear_dgrad"), (g, *call), tokens, cols, dtype=dtype)
    as_good_as_dense(dx, w.t(), g)
    transposed = unaligned(x.t().contiguous())  # [cols, tokens]: the columns are now the tokens that wgrad sums over
    dw = into(gemms.run("nm_linear_wgrad"), (*call, transposed), rows, tokens, dtype=dtype)
    as_good_as_dense(dw, w, transposed, by_column=True)
    wide = into(gemms.run("nm_linear_wgrad"), (*call, transposed, torch.float32), rows, tokens, dtype=torch.float32)
    if gemms.tiles:
        assert_equal_bits(wide.to(BF16), dw, "the same sums, rounded later")
        # of so many terms, added in any order (products of bf16 are exact); torch adds in blocks, with smaller errors
        exact = w.double() @ transposed.double()
        assert ((wide - exact).abs() <= p.kept(cols) * 2**-24 * (w.double().abs() @ transposed.double().abs())).all()
    else:
        as_good_as_dense(wide, w, transposed, by_column=True)


@pytest.mark.quick(2, per="gemms")
@every_pattern
def test_as_good_as_dense(gemms, text):
    rows, tokens = (49, [1, 2, 5, 8, 9, 17, 33, 64, 65]) if gemms.tiles else (17, [1, 5, 17, 63, 64, 129])
    for dtype, count in product(gemms.dtypes, tokens):
        check(gemms, text, dtype, rows, 768, count)


@pytest.mark.quick(2)
@chosen
@every_pattern
def test_odd_sizes(gemms, text):
    m = Pattern(text).m
    for rows, tokens, cols in product([1, 3, 65], [0, 3, 300], sorted({m, 2 * m - 1, 5 * m - 2, 5 * m})):
        check(gemms, text, torch.float32, rows, cols, tokens)


@pytest.mark.slow
@in_tiles
@every_pattern
def test_odd_sizes_in_tiles(gemms, text):
    m = Pattern(text).m
    for rows, tokens, cols in product([1, 3, 65], [0, 1, 3, 40], sorted({m, 2 * m - 1, 5 * m - 2, 5 * m, 1024 // m * m + 5})):
        check(gemms, text, BF16, rows, cols, tokens)


@pytest.mark.slow
@in_tiles
@for_each("text", ["2:4", "1:8", "3:5"])
def test_several_blocks_of_everything(gemms, text):
    for rows, cols, tokens in [(700, 1100, 70), (300, 64, 1100), (40, 9000, 40), (33, 6000, 3)]:
        check(gemms, text, BF16, rows, cols, tokens)


@chosen
def test_a_long_sum_stays_exact(gemms):
    check(gemms, "2:4", torch.float32, 5, 11008, 40)


def test_empty_operands(gemms):
    dtype = gemms.dtypes[0]
    for rows, cols in ((0, 8), (6, 0), (0, 0)):
        call = *reference.compress(torch.randn(rows, cols, dtype=dtype), 2, 4), 2, 4, cols
        x, g, bias = (torch.randn(size, dtype=dtype) for size in ((3, cols), (3, rows), (rows,)))
        assert_equal_bits(gemms.run("nm_linear")(x, *call), torch.zeros(3, rows, dtype=dtype))
        assert_equal_bits(gemms.run("nm_linear")(torch.zeros_like(x), *call, bias), bias.expand(3, rows))
        assert_equal_bits(gemms.run("nm_linear_dgrad")(g, *call), torch.zeros(3, cols, dtype=dtype))
        assert_equal_bits(gemms.run("nm_linear_wgrad")(*call, x.t()), torch.zeros(rows, 3, dtype=dtype))


def test_damaged_indices_raise(gemms):
    for text, groups in product(["3:5", "1:8", "2:8", "4:8", "1:20", "200:255"], (4, 70)):
        p, dtype = Pattern(text), gemms.dtypes[0]
        cols = groups * p.m
        values, indices = reference.compress(torch.randn(9, cols).to(dtype), p.n, p.m)
        indices[7, -1] = 255
        call, (x, one, g) = (values, indices, p.n, p.m, cols), (torch.randn(shape).to(dtype) for shape in ((20, cols), (1, cols), (20, 9)))
        calls = ("nm_linear", (one, *call)), ("nm_linear", (x, *call)), ("nm_linear_wgrad", (*call, x.t())), ("nm_linear_dgrad", (g, *call))
        for op, args in calls:
            with pytest.raises(ShapeError, match=f"does not exist in a group of {p.m}"):
                gemms.run(op)(*args)


@chosen
def test_a_column_named_too_often_raises(gemms):
    values, indices = torch.ones(2000, 2), torch.zeros(2000, 1, dtype=torch.uint8)
    with pytest.raises(ShapeError, match="damaged"):
        gemms.run("nm_linear_dgrad")(torch.ones(20, 2000), values, indices, 2, 4, 4)


@for_each("text", ["2:4", "2:8", "4:8", "3:5"])
def test_any_order_within_a_group(gemms, text):
    p, gen = Pattern(text), torch.Generator().manual_seed(5)
    rows, cols = 9, 1024 // p.m * p.m
    for dtype in gemms.dtypes:
        values, indices, w = packed(text, rows, cols, dtype, gen=gen)
        positions = unpack_indices(indices, p.index_bits, values.shape[1])
        values, positions = (x.unflatten(1, (-1, p.n)).flip(-1).flatten(1).contiguous() for x in (values, positions))
        call = values, pack_indices(positions, p.index_bits), p.n, p.m, cols
        for tokens in (1, 3, 40):
            x, g = (torch.randn(tokens, size, generator=gen).to(dtype) for size in (cols, rows))
            as_good_as_dense(gemms.run("nm_linear")(x, *call), w, x)
            as_good_as_dense(gemms.run("nm_linear_dgrad")(g, *call), w.t(), g)


@for_each("tokens", [20, 1, 4, 9])
@for_each("junk", [9.0, float("inf"), float("nan")])
def test_what_is_stored_past_the_end_counts_for_nothing(gemms, tokens, junk):
    for dtype in gemms.dtypes:
        values, indices = reference.compress(torch.tensor([[1.0, 0.0, 2.0, 7.0, 0.0, 9.0, 0.0, junk]], dtype=dtype), 2, 4)
        w = torch.tensor([[0.0, 0.0, 2.0, 7.0, 0.0, 9.0]], dtype=dtype)
        x = torch.ones(tokens, 6, dtype=dtype)
        assert_equal_bits(gemms.run("nm_linear")(x, values, indices, 2, 4, 6), x @ w.t())
        assert_equal_bits(gemms.run("nm_linear_dgrad")(x[:, :1], values, indices, 2, 4, 6), x[:, :1] @ w)
        assert_equal_bits(gemms.run("nm_linear_wgrad")(values, indices, 2, 4, 6, x.t()), w @ x.t())


@chosen
def test_only_stored_weights_meet_what_is_not_finite(gemms):
    for dtype, bad in product(DTYPES, [float("nan"), float("inf"), -float("inf")]):
        if dtype == BF16 and core().bf16_dots():
            continue  # zeros are multiplied too: the next test
        w = torch.tensor([[1.0, 2.0, 0.0, 0.0], [0.0, 0.0, 3.0, 4.0], [0.0, 5.0, 6.0, 0.0]], dtype=dtype)
        call = (*reference.compress(w, 2, 4), 2, 4, 4)
        x, g = torch.ones(40, 4, dtype=dtype), torch.ones(40, 3, dtype=dtype)
        x[7, 1] = g[7, 0] = bad
        y = gemms.run("nm_linear")(x, *call)
        assert torch.isfinite(y[:7]).all() and torch.isfinite(y[8:]).all()
        assert torch.isfinite(y[7]).tolist() == [False, True, False]
        assert_equal_bits(gemms.run("nm_linear_wgrad")(*call, x.t()), y.t())
        assert torch.isfinite(gemms.run("nm_linear_dgrad")(g, *call)[7]).tolist() == [False, False, True, True]


@in_tiles
@for_each("tokens", [1, 5, 40])
def test_what_is_not_finite_stays_with_its_token(gemms, tokens):
    values, indices, _ = packed("2:4", 20, 70, BF16)
    x = torch.ones(tokens, 70, dtype=BF16)
    x[tokens // 2, 69] = float("nan")
    finite = torch.isfinite(gemms.run("nm_linear")(x, values, indices, 2, 4, 70)).all(1)
    assert finite.tolist() == [t != tokens // 2 for t in range(tokens)]


@for_each(
    "text, tokens", [("2:4", 700), ("3:5", 700), ("1:8", 700), ("1:8", 40), ("2:4", 5), ("1:32", 7), ("2:4", 1), ("3:5", 1), ("1:8", 1)]
)
def test_same_bits_on_any_number_of_threads(gemms, on_threads, text, tokens):
    p, gen = Pattern(text), torch.Generator().manual_seed(3)
    for dtype in gemms.dtypes if tokens < 10 else gemms.dtypes[:1]:
        values, indices, _ = packed(text, 600, 40 * p.m, dtype, gen=gen)
        x, g = (torch.randn(tokens, n, generator=gen).to(dtype) for n in (40 * p.m, 600))
        call = (values, indices, p.n, p.m, 40 * p.m)
        calls = (("nm_linear", (x, *call)), ("nm_linear_dgrad", (g, *call)), ("nm_linear_wgrad", (*call, x.t())))
        one, two, three = on_threads(lambda calls=calls: [gemms.run(op)(*args) for op, args in calls])
        assert_equal_bits([two, three], [one, one])


# ---- few tokens


class TestFewTokens(FewTokensSuite):
    pass


@pytest.mark.quick(2)
@every_dtype
@for_each("text", FEW)
def test_few_tokens_are_as_good_as_dense(cpu, text, dtype):
    p = Pattern(text)
    for rows, cols in ((1, p.m), (3, 1280 + 3 * p.m), (17, 2 * p.m), (5, 40 * p.m), (6, 16 * p.m // p.n + p.m - 1), (2, 1)):
        values, indices, w = packed(text, rows, cols, dtype)
        for tokens in (0, 1, 2, 3, 5, 8):
            x, bias = inputs(tokens, cols, dtype), inputs(1, rows, dtype)[0]
            for b in (None, bias):
                out = fill_poison(torch.empty(tokens, rows, dtype=dtype))
                cpu("nm_linear")(x, values, indices, p.n, p.m, cols, b, out=out)
                as_good_as_dense(out, w, x, b)
                apart, there = [None if t is None else unaligned(t) for t in (x, values, indices, b)], unaligned(fill_poison(out.clone()))
                cpu("nm_linear")(*apart[:3], p.n, p.m, cols, apart[3], out=there)
                assert_equal_bits(there, out, f"{rows} x {cols}, {tokens} tokens, unaligned")


@for_each("text", ["1:2", "1:8", "2:8", "4:8", "1:32", "3:5", "1:64"])
@for_each("tokens", [1, 4, 5])
def test_a_damaged_index_anywhere_raises(cpu, text, tokens):
    p = Pattern(text)
    cols = 2 * 16 * p.m + 3 * p.m
    values, indices, _ = packed(text, 6, cols)
    x = torch.full((tokens, cols), float("nan"))
    for at in ((0, 0), (5, 17), (3, p.kept(cols) - 1), (1, p.kept(cols) // 2)):
        with pytest.raises(ShapeError, match=f"does not exist in a group of {p.m}"):
            cpu("nm_linear")(x, values, damaged(indices, p, *at), p.n, p.m, cols)


def test_denormals_and_zeros(cpu):
    values, indices, w = packed("2:4", 4, 128)
    for scale in (1e-38, 0.0, -0.0):
        y = cpu("nm_linear")(inputs(2, 128) * scale, values, indices, 2, 4, 128)
        torch.testing.assert_close(
            y.double(),
            (inputs(2, 128) * scale).double() @ w.double().t(),
            rtol=0,
            atol=64 * 2**-150,  # half a denormal for each product
        )


@every_dtype
@for_each("text", ["2:4", "1:8", "1:16"])
def test_cancelling_sums_are_as_good_as_dense(cpu, text, dtype):
    """Large terms that cancel: the error stays that of torch's sum, although far above eps of the result."""
    p, gen = Pattern(text), torch.Generator().manual_seed(3)
    values, indices, w = packed(text, 64, 4096, dtype)
    x = inputs(1, 4096, dtype) * torch.tensor([1.0, 1e3]).repeat(2048)[torch.randperm(4096, generator=gen)].to(dtype)
    as_good_as_dense(cpu("nm_linear")(x, values, indices, p.n, p.m, 4096), w, x)
