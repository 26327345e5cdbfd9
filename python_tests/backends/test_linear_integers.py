"""Weights of integers with steps under every instruction set: products with few tokens, decoding, rounding."""

import pytest
import torch

from nmkernels import Pattern, ShapeError, reference
from nmkernels.backends.cpu.core import DTYPES, core
from nmkernels.testing import assert_equal_bits, assert_no_worse, fill_poison
from python_tests.backends.gemm_calls import damaged, inputs, integer_weight, product_of_integers, steps_of, unaligned
from python_tests.backends.kernel_suites import IntegersSuite
from python_tests.for_each import for_each

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TUNED = ("2:4", "1:4", "1:8", "2:8", "4:8")
OTHERS = ("1:16", "3:5", "4:4", "7:12", "2:32")


def check(cpu, *call, **what):
    return product_of_integers(cpu("nm_linear_integers"), *call, **what)


class TestIntegers(IntegersSuite):
    tuned = TUNED


@for_each("bits", [8, 4])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.quick(1)
@for_each("text", TUNED + OTHERS)
def test_products(cpu, text, dtype, bits):
    p = Pattern(text)
    for rows, cols in ((7, p.m), (17, 17 * p.m + 1), (19, 64 * p.m), (35, 512), (67, 1280), (20, 1024 + 5 * p.m)):
        for steps in steps_of(p, cols):
            operands = integer_weight(text, rows, cols, bits, steps)
            for count in (0, 1, 2, 3, 5, 8, 16):
                x, bias = inputs(count, cols, dtype), inputs(1, rows, dtype)[0]
                y = check(cpu, text, x, operands, bias, what=f"{rows} rows, {steps} steps")
                apart = [unaligned(t) for t in (x, *operands)]
                assert_equal_bits(cpu("nm_linear_integers")(*apart, p.n, p.m, cols, unaligned(bias)), y)


@for_each("text", ["2:4", "1:8"])
@for_each("bits", [8, 4])
def test_every_number_of_tokens(cpu, text, bits):
    for steps in (1, 4):
        operands = integer_weight(text, 40, 512, bits, steps)
        for count in (*range(1, 18), 24, 25, 33, 128, 129):
            check(cpu, text, inputs(count, 512, BF16), operands)


@pytest.mark.quick(1)
@for_each("text", TUNED + OTHERS)
@for_each("bits", [8, 4])
@for_each("dtype", [BF16, F16])
def test_before_rounding(isa, text, bits, dtype):
    """Inputs have errors of up to 2^-15 of a token's largest, of any sign; sums in fp32 add far less."""
    p, rows, cols = Pattern(text), 37, 1280
    for steps in steps_of(p, cols)[:4]:
        values, indices, step = integer_weight(text, rows, cols, bits, steps)
        decoded = reference.dequantize_values(values, step, p.kept(cols), torch.float64)
        w = reference.decompress(decoded, indices, p.n, p.m, cols)
        for count in (1, 2, 3, 4, 6, 11, 16):
            x, y = inputs(count, cols, dtype), fill_poison(torch.empty(count, rows))
            assert core().linear_integers(
                *(t.data_ptr() for t in (x, values, indices, step)), 0, y.data_ptr(), DTYPES[dtype], DTYPES[F32], count, rows, cols,
                p.kept(cols), steps, bits, p.n, p.m, 2,
            )  # fmt: skip
            wide = x.double()
            bound = 2**-13 * wide.abs().amax(1, keepdim=True) * w.norm(dim=1) + 1e-6 * (wide.abs() @ w.abs().t())
            worst = ((y.double() - wide @ w.t()).abs() / bound).max().item()
            assert worst <= 1, f"{steps} steps, {count} tokens: {worst:.2f} of the bound"


@for_each("text", ["1:8", "2:8", "4:8", "3:5"])
@for_each("count", [1, 4, 12])
def test_a_damaged_index_raises(cpu, text, count):
    p = Pattern(text)
    cols = 520 * p.m // 4
    values, indices, step = integer_weight(text, 6, cols, 8)
    x = inputs(count, cols, BF16)
    for at in ((0, 0), (5, 17), (3, p.kept(cols) - 1)):
        with pytest.raises(ShapeError, match=f"does not exist in a group of {p.m}"):
            cpu("nm_linear_integers")(x, values, damaged(indices, p, *at), step, p.n, p.m, cols)


@for_each("count", [1, 4, 12])
def test_indices_in_another_order(cpu, count):
    """Not as compress writes them, but every kernel takes them."""
    values, indices, step = integer_weight("2:4", 8, 1024, 8)
    swapped = values.clone()
    swapped[3, 0::2], swapped[3, 1::2] = values[3, 1::2], values[3, 0::2]
    turned = indices.clone()
    turned[3] = (indices[3] & 0x33) << 2 | (indices[3] & 0xCC) >> 2
    x = inputs(count, 1024, BF16)
    check(cpu, "2:4", x, (swapped, turned, step))
    exact = reference.linear_integers(x.double(), values, indices, step, 2, 4, 1024)
    ours = cpu("nm_linear_integers")(x, swapped, turned, step, 2, 4, 1024)
    assert_no_worse(ours, exact.to(BF16), exact)


@pytest.mark.quick(1)
@for_each("bits", [8, 4])
@for_each("dtype", [BF16, F32])
def test_same_bits_on_any_number_of_threads(cpu, on_threads, dtype, bits):
    operands = integer_weight("2:4", 1025, 1280, bits, 10)
    for count in (1, 2, 7, 16):
        x = inputs(count, 1280, dtype)
        first, *others = on_threads(lambda x=x: cpu("nm_linear_integers")(x, *operands, 2, 4, 1280))
        for other in others:
            assert_equal_bits(other, first)
