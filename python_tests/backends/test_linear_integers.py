"""Weights of integers with steps under every instruction set: products with few tokens, decoding, rounding."""

import pytest
import torch

from nmkernels import Pattern, ShapeError, reference
from nmkernels.backends.cpu.core import DTYPES, core
from nmkernels.reference.integers import pack_integers
from nmkernels.testing import assert_equal_bits, assert_no_worse, fill_poison
from python_tests.backends.gemm_calls import integer_weight, product_of_integers, unaligned
from python_tests.for_each import for_each

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TUNED = ("2:4", "1:4", "1:8", "2:8", "4:8")
OTHERS = ("1:16", "3:5", "4:4", "7:12", "2:32")


def tokens_of(count, cols, dtype, seed=0):
    return torch.randn(count, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(cpu, *call, **what):
    return product_of_integers(cpu("nm_linear_integers"), *call, **what)


def steps_of(p, cols):
    """Numbers of steps per row that may be: one, and runs of whole groups."""
    return [1] + [cols // group for group in (32, 64, 128, 256, cols // 2) if group and cols % group == 0 and group % p.m == 0]


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
                x, bias = tokens_of(count, cols, dtype), tokens_of(1, rows, dtype)[0]
                y = check(cpu, text, x, operands, bias, what=f"{rows} rows, {steps} steps")
                apart = [unaligned(t) for t in (x, *operands)]
                assert_equal_bits(cpu("nm_linear_integers")(*apart, p.n, p.m, cols, unaligned(bias)), y)


@for_each("text", ["2:4", "1:8"])
@for_each("bits", [8, 4])
def test_every_number_of_tokens(cpu, text, bits):
    for steps in (1, 4):
        operands = integer_weight(text, 40, 512, bits, steps)
        for count in (*range(1, 18), 24, 25, 33, 128, 129):
            check(cpu, text, tokens_of(count, 512, BF16), operands)


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
            x, y = tokens_of(count, cols, dtype), fill_poison(torch.empty(count, rows))
            assert core().linear_integers(
                *(t.data_ptr() for t in (x, values, indices, step)), 0, y.data_ptr(), DTYPES[dtype], DTYPES[F32], count, rows, cols,
                p.kept(cols), steps, bits, p.n, p.m, 2,
            )  # fmt: skip
            wide = x.double()
            bound = 2**-13 * wide.abs().amax(1, keepdim=True) * w.norm(dim=1) + 1e-6 * (wide.abs() @ w.abs().t())
            worst = ((y.double() - wide @ w.t()).abs() / bound).max().item()
            assert worst <= 1, f"{steps} steps, {count} tokens: {worst:.2f} of the bound"


@for_each("dtype", [BF16, F16, F32])
def test_what_follows_the_product(cpu, dtype):
    operands = integer_weight("2:4", 24, 256, 4, 2)
    for count in (1, 6, 50):
        x, bias, residual = tokens_of(count, 256, dtype), tokens_of(1, 24, dtype)[0], tokens_of(count, 24, dtype, 7)
        for activation in ("", "gelu", "silu", "relu2"):
            for after in (None, residual):
                check(cpu, "2:4", x, operands, bias, activation, after)


@pytest.mark.quick(1)
@for_each("text", TUNED)
@for_each("bits", [8, 4])
def test_largest_values(cpu, text, bits):
    """All products of one sign, and every digit at its end."""
    for count in (1, 2, 4, 12):
        for cols in (512, 8192):
            operands = integer_weight(text, 4, cols, bits, 1, extreme=True)
            for x in (torch.full((count, cols), 255 / 128), torch.full((count, cols), -255 / 128), torch.ones(count, cols)):
                check(cpu, text, x.to(BF16), operands)
                check(cpu, text, x.to(F16), operands)


@for_each("dtype", [BF16, F16])
@for_each("bits", [8, 4])
def test_one_large_column(cpu, bits, dtype):
    operands = integer_weight("2:4", 64, 1024, bits, 8)
    for count in (1, 4, 9):
        x = tokens_of(count, 1024, dtype)
        x[:, 77] *= 100
        check(cpu, "2:4", x, operands)


@for_each("text", ["2:4", "1:4", "2:8"])
def test_tokens_that_are_not_finite(cpu, text):
    p = Pattern(text)
    operands = integer_weight(text, 33, 256, 8, 2)
    stored = reference.decompress(operands[0].float().abs() + 1, operands[1], p.n, p.m, 256) != 0
    for count in (2, 5, 16):
        clean = tokens_of(count, 256, BF16)
        for bad in (float("nan"), float("inf"), -float("inf")):
            x = clean.clone()
            x[1, 5] = bad
            y = cpu("nm_linear_integers")(x, *operands, p.n, p.m, 256)
            before = cpu("nm_linear_integers")(clean, *operands, p.n, p.m, 256)
            others = [t for t in range(count) if t != 1]
            assert_equal_bits(y[others], before[others])
            # only stored weights are multiplied
            assert torch.equal(y[1].isfinite(), ~stored[:, 5])


def test_steps_that_are_zero_tiny_or_nan(cpu):
    values, indices, step = integer_weight("2:4", 6, 256, 8, 2)
    step[0], step[1, 1], step[2] = 0, 0, 1e-39
    for count in (1, 2, 5):
        x = tokens_of(count, 256, BF16)
        check(cpu, "2:4", x, (values, indices, step))
        nan = step.clone()
        nan[3, 1] = float("nan")
        y = cpu("nm_linear_integers")(x, values, indices, nan, 2, 4, 256)
        assert torch.equal(y.isnan().any(0), torch.arange(6) == 3)


@for_each("scale", [0.0, 1e-39, 1e-30, 1e30])
def test_extreme_inputs(cpu, scale):
    operands = integer_weight("2:4", 16, 256, 8)
    for count in (1, 3):
        check(cpu, "2:4", (tokens_of(count, 256, F32) * scale).to(BF16), operands)


@for_each("text", ["1:8", "2:8", "4:8", "3:5"])
@for_each("count", [1, 4, 12])
def test_a_damaged_index_raises(cpu, text, count):
    p = Pattern(text)
    cols = 520 * p.m // 4
    values, indices, step = integer_weight(text, 6, cols, 8)
    x, per_byte = tokens_of(count, cols, BF16), 8 // p.index_bits
    for row, k in ((0, 0), (5, 17), (3, p.kept(cols) - 1)):
        broken = indices.clone()
        broken[row, k // per_byte] |= (2**p.index_bits - 1) << (k % per_byte * p.index_bits)
        with pytest.raises(ShapeError, match=f"does not exist in a group of {p.m}"):
            cpu("nm_linear_integers")(x, values, broken, step, p.n, p.m, cols)


@for_each("count", [1, 4, 12])
def test_indices_in_another_order(cpu, count):
    """Not as compress writes them, but every kernel takes them."""
    values, indices, step = integer_weight("2:4", 8, 1024, 8)
    swapped = values.clone()
    swapped[3, 0::2], swapped[3, 1::2] = values[3, 1::2], values[3, 0::2]
    turned = indices.clone()
    turned[3] = (indices[3] & 0x33) << 2 | (indices[3] & 0xCC) >> 2
    x = tokens_of(count, 1024, BF16)
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
        x = tokens_of(count, 1280, dtype)
        first, *others = on_threads(lambda x=x: cpu("nm_linear_integers")(x, *operands, 2, 4, 1280))
        for other in others:
            assert_equal_bits(other, first)


@for_each("bits", [8, 4])
@for_each("dtype", [F32, BF16, F16])
def test_dequantize(cpu, dtype, bits):
    for rows, kept, steps in ((1, 1, 1), (3, 15, 1), (5, 15, 5), (2, 128, 4), (7, 1000, 8), (0, 8, 2), (300, 64, 1)):
        gen = torch.Generator().manual_seed(kept)
        values = pack_integers(torch.randint(-8, 8, (rows, kept), generator=gen).to(torch.int8), bits)
        step = torch.randn(rows, steps, generator=gen).to(BF16)
        step[: rows // 2] *= 1e-38
        out = fill_poison(torch.empty(rows, kept, dtype=dtype))
        cpu("nm_dequantize_values")(values, step, kept, dtype, out=out)
        assert_equal_bits(out, reference.dequantize_values(values, step, kept, dtype))


def hard(rows, kept):
    """Ties, zeros, denormals, magnitudes of every size, and rows that are not finite."""
    gen = torch.Generator().manual_seed(kept)
    w = torch.randn(rows, kept, generator=gen) * 10.0 ** torch.randint(-44, 38, (rows, 1), generator=gen)
    for row, value in enumerate((0.0, -0.0, 1e-45, -1e-40, 3e38, float("nan"), float("inf"), -1.0)):
        w[row, kept // 2 :] = value
        if row < 5:
            w[row, : kept // 2] = 0.0 if row % 2 else value
    w[8] = torch.arange(kept) % 17 - 8.0
    w[9] = torch.linspace(-127, 127, kept)
    w[10] = (torch.randint(-255, 256, (kept,), generator=gen) / 2).clamp(-127, 127)
    return w


@for_each("bits", [8, 4])
@for_each("dtype", [F32, BF16, F16])
def test_quantize(cpu, dtype, bits):
    for kept, steps in ((1, 1), (15, 1), (15, 3), (64, 1), (128, 4), (500, 5)):
        w = hard(24, kept).to(dtype)
        assert_equal_bits(cpu("nm_quantize_values")(w, bits, steps), reference.quantize_values(w, bits, steps))
    for shape in ((0, 8), (2, 3, 24), (3, 0)):
        w = torch.randn(shape).to(dtype)
        assert_equal_bits(cpu("nm_quantize_values")(w, bits, 1), reference.quantize_values(w, bits, 1))
