"""linear for few tokens from the compressed form, under every instruction set: shapes, dtypes, and what is edge-case about them."""

import pytest
import torch
import torch.nn.functional as F

from nmkernels import Pattern, ShapeError
from nmkernels.testing import assert_equal_bits, assert_no_worse, fill_poison
from python_tests.backends import gemm_calls
from python_tests.backends.gemm_calls import inputs, unaligned
from python_tests.backends.kernel_suites import FewTokensSuite
from python_tests.for_each import for_each

TUNED = ("2:4", "1:4", "2:8", "1:8", "4:8", "1:16", "1:32")
OTHERS = ("1:1", "1:2", "3:5", "4:4", "5:16", "2:32", "7:64", "200:256")
every_dtype = for_each("dtype", [torch.float32, torch.bfloat16, torch.float16])


class TestFewTokens(FewTokensSuite):
    pass


def packed(text, rows, cols, dtype=torch.float32):
    """A compressed matrix, its last group cut off where the columns end, and the matrix."""
    p, (values, indices, w) = Pattern(text), gemm_calls.packed(text, rows, cols, dtype)
    return values[:, : p.kept(cols)].contiguous(), indices[:, : p.index_bytes(cols)].contiguous(), w


@pytest.mark.quick(2)
@every_dtype
@for_each("text", TUNED + OTHERS)
def test_is_as_good_as_dense(cpu, text, dtype):
    p = Pattern(text)
    for rows, cols in ((1, p.m), (3, 1280 + 3 * p.m), (17, 2 * p.m), (5, 40 * p.m), (6, 16 * p.m // p.n + p.m - 1), (2, 1)):
        values, indices, w = packed(text, rows, cols, dtype)
        for tokens in (0, 1, 2, 3, 5, 8):
            x, bias = inputs(tokens, cols, dtype), inputs(1, rows, dtype)[0]
            for b in (None, bias):
                out = fill_poison(torch.empty(tokens, rows, dtype=dtype))
                cpu("nm_linear")(x, values, indices, p.n, p.m, cols, b, out=out)
                doubles, what = [None if t is None else t.double() for t in (x, w, b)], f"{rows} x {cols}, {tokens} tokens"
                assert_no_worse(out, F.linear(x, w, b), F.linear(*doubles), what)
                apart, there = [None if t is None else unaligned(t) for t in (x, values, indices, b)], unaligned(fill_poison(out.clone()))
                cpu("nm_linear")(*apart[:3], p.n, p.m, cols, apart[3], out=there)
                assert_equal_bits(there, out, f"{what}, unaligned")


@pytest.mark.quick(1)
@every_dtype
@for_each("text", ["2:4", "1:8", "1:32", "3:5"])
@pytest.mark.slow
def test_same_bits_on_any_number_of_threads(cpu, text, dtype):
    p = Pattern(text)
    cols = 20 * 16 * p.m // p.n + p.m
    values, indices, _ = packed(text, 1025, cols, dtype)
    before = torch.get_num_threads()
    try:
        for tokens in (1, 7):
            x, found = inputs(tokens, cols, dtype), []
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                found.append(cpu("nm_linear")(x, values, indices, p.n, p.m, cols))
            assert_equal_bits(found[0], found[1])
            assert_equal_bits(found[0], found[2])
    finally:
        torch.set_num_threads(before)


@for_each("text", ["1:2", "1:8", "2:8", "4:8", "1:32", "3:5", "1:64"])
@for_each("tokens", [1, 4, 5])
def test_a_damaged_index_anywhere_raises(cpu, text, tokens):
    p = Pattern(text)
    cols = 2 * 16 * p.m + 3 * p.m
    values, indices, _ = packed(text, 6, cols)
    x = torch.full((tokens, cols), float("nan"))
    per_byte = 8 // p.index_bits
    for row, k in ((0, 0), (5, 17), (3, p.kept(cols) - 1), (1, p.kept(cols) // 2)):
        broken = indices.clone()
        broken[row, k // per_byte] |= (2**p.index_bits - 1) << (k % per_byte * p.index_bits)
        with pytest.raises(ShapeError, match=f"does not exist in a group of {p.m}"):
            cpu("nm_linear")(x, values, broken, p.n, p.m, cols)


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
    y = cpu("nm_linear")(x, values, indices, p.n, p.m, 4096)
    assert_no_worse(y, F.linear(x, w), F.linear(x.double(), w.double()))
