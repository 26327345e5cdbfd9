"""Weights of integers with steps in Triton: products with few tokens, decoding, rounding."""

from __future__ import annotations

import pytest
import torch

from nmkernels import Pattern, reference
from nmkernels.backends.triton import integers as family
from nmkernels.testing import assert_equal_bits, fill_poison, poison
from python_tests.backends.gemm_calls import integer_weight, product_of_integers, unaligned
from python_tests.backends.test_linear_integers import hard, steps_of, tokens_of
from python_tests.for_each import for_each

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
WORDS = ("2:4", "1:4", "1:8", "2:8", "4:8", "1:16", "1:32")
OTHERS = ("3:5", "7:12", "1:2", "2:32", "4:4")


def product(x, operands, text, cols, *rest):
    """The Triton result, every byte of it written."""
    p, device = Pattern(text), operands[0].device
    extras = [r.to(device) if isinstance(r, torch.Tensor) else r for r in rest]
    with poison():
        return family.linear_integers(x.to(device), *operands, p.n, p.m, cols, *extras).cpu()


def judged(x, operands, text, cols, *rest):
    """The Triton result, no worse than the reference's in x's dtype."""
    return product_of_integers(
        lambda x, a, b, c, n, m, cols, *rest: product(x, (a, b, c), f"{n}:{m}", cols, *rest), text, x, operands, *rest
    )


def on(device, operands):
    return [t.to(device) for t in operands]


@pytest.fixture
def ran(monkeypatch):
    """The products that run: "few" for a few tokens, "spmm" on tensor cores, "linear" of decoded values."""
    calls = []

    def recorded(name, fn):
        return lambda *args: calls.append(name) or fn(*args)

    for name in ("few", "spmm", "linear"):
        monkeypatch.setattr(family, name, recorded(name, getattr(family, name)))
    return calls


@pytest.mark.quick(1)
@pytest.mark.parametrize("text", WORDS + OTHERS)
@for_each("bits", [8, 4])
def test_products(text, bits, device):
    m = Pattern(text).m
    for rows, cols, dtype, count in ((70, 16 * m + 1, F32, 3), (9, 32 * m, BF16, 2), (70, 32 * m, BF16, 6), (20, 640, F16, 16)):
        cols = cols // m * m if cols == 640 else cols
        for steps in steps_of(Pattern(text), cols):
            judged(tokens_of(count, cols, dtype), on(device, integer_weight(text, rows, cols, bits, steps)), text, cols)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@for_each("bits", [8, 4])
def test_every_number_of_tokens(dtype, bits, device, ran):
    operands = on(device, integer_weight("2:4", 24, 256, bits, 2))
    ran.clear()
    for count in range(1, 18):
        judged(tokens_of(count, 256, dtype), operands, "2:4", 256, tokens_of(1, 24, dtype)[0])
    # float32 is multiplied four tokens at a time
    middle = ["spmm"] * 12 if dtype != F32 else ["few"] * sum(-(-count // 4) for count in range(5, 17))
    assert ran == ["few"] * 4 + middle + ["linear"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("text", ["2:4", "1:8", "4:8", "3:5", "1:4", "1:16"])
@for_each("bits, count, dtype", [(8, 4, F32), (4, 3, F32), (8, 16, BF16), (4, 16, BF16), (4, 9, F16)])
def test_every_value_is_decoded_and_placed(text, bits, count, dtype, device):
    """One-hot tokens return the weight to the bit; with the smallest integers among it."""
    p, cols = Pattern(text), 32 * Pattern(text).m
    for steps in (1, 4):
        values, indices, step = integer_weight(text, 11, cols, bits, steps)
        values[2] = integer_weight(text, 11, cols, bits, steps, extreme=True)[0][2]
        w = reference.decompress(reference.dequantize_values(values, step, p.kept(cols), dtype), indices, p.n, p.m, cols)
        for first in (0, cols // 2, cols - count):
            y = product(torch.eye(cols, dtype=dtype)[first : first + count], on(device, (values, indices, step)), text, cols)
            assert_equal_bits(y + 0.0, w[:, first : first + count].t().contiguous() + 0.0)


@for_each("cols", [248, 247, 512])
def test_two_groups_in_a_byte(cols, device, ran):
    """One integer of 4 bits per group; an odd number of groups ends inside a byte."""
    ran.clear()
    for x in (tokens_of(6, cols, BF16), torch.eye(cols, dtype=BF16)[cols - 16 :]):
        judged(x, on(device, integer_weight("1:8", 6, cols, 4)), "1:8", cols)
    assert ran == ["spmm", "spmm"]


@for_each("dtype", [BF16, F16, F32])
def test_what_follows_the_product(dtype, device):
    operands = on(device, integer_weight("2:4", 24, 128, 4, 2))
    for i, activation in enumerate(("", "gelu", "silu", "relu2")):
        for count in (2, 6, 20):
            x, bias, residual = tokens_of(count, 128, dtype), tokens_of(1, 24, dtype)[0], tokens_of(count, 24, dtype, 7)
            judged(x, operands, "2:4", 128, bias, activation, residual if i % 2 else None)
    y = judged(tokens_of(6, 128, dtype).view(2, 3, 128), operands, "2:4", 128)
    assert y.shape == (2, 3, 24)


def test_split_sums(device, monkeypatch):
    """Of several tiles of columns per part and per step, the last part shorter."""
    whole = family.plan
    monkeypatch.setattr(family, "plan", lambda *args: whole(*args)._replace(splits=3))
    for bits, steps in ((8, 1), (4, 8), (4, 2)):
        operands = on(device, integer_weight("2:4", 70, 1024, bits, steps))
        judged(tokens_of(7, 1024, BF16), operands, "2:4", 1024, tokens_of(1, 70, BF16)[0], "silu")


@for_each("bits", [8, 4])
@for_each("dtype, count", [(BF16, 2), (BF16, 6), (F32, 6)])
def test_tokens_that_are_not_finite(dtype, count, bits, device):
    """One of them reaches what it meets or, on tensor cores, all of its token; never another token."""
    operands = integer_weight("2:4", 16, 64, bits, 2)
    decoded = reference.dequantize_values(operands[0], operands[2], 32, F32).abs() + 1
    stored = reference.decompress(decoded, operands[1], 2, 4, 64) != 0
    clean = tokens_of(count, 64, dtype)
    before = product(clean, on(device, operands), "2:4", 64)
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = clean.clone()
        x[1, 5] = bad
        y = product(x, on(device, operands), "2:4", 64)
        others = [t for t in range(count) if t != 1]
        assert_equal_bits(y[others], before[others])
        assert torch.equal(y[1].isfinite(), ~stored[:, 5] if count == 2 or dtype == F32 else torch.zeros(16, dtype=torch.bool))


@for_each("count", [2, 6, 20])
def test_steps_that_are_zero_tiny_or_nan(count, device):
    values, indices, step = integer_weight("2:4", 6, 256, 8, 2)
    step[0], step[1, 1], step[2] = 0, 0, 1e-39
    x = tokens_of(count, 256, BF16)
    y = judged(x, on(device, (values, indices, step)), "2:4", 256)
    assert not y[:, 0].any()
    step[3, 1] = float("nan")
    y = product(x, on(device, (values, indices, step)), "2:4", 256)
    assert torch.equal(y.isnan(), torch.arange(6).eq(3).expand(count, 6))


@for_each("count", [2, 6, 20])
def test_weights_beyond_the_range_of_float16(count, device):
    values, indices, step = integer_weight("2:4", 6, 64, 8, 2, extreme=True)
    y = judged(tokens_of(count, 64, F16) * 1e-3, on(device, (values, indices, torch.full_like(step, 600.0))), "2:4", 64)
    assert y.isfinite().all()


@for_each("text, bits", [("2:4", 8), ("4:8", 8), ("4:8", 4)])
def test_memory_anywhere(text, bits, device, ran):
    """Where no word holds the values of a group, or none the indices of several, values are read one by one."""
    ran.clear()
    cols = 32 * Pattern(text).m
    operands = on(device, integer_weight(text, 10, cols, bits, 2))
    x = tokens_of(6, cols, BF16).to(device)
    for moved in (0, 1):
        judged(unaligned(x).cpu(), [unaligned(t) if i == moved else t for i, t in enumerate(operands)], text, cols)
    assert ran == ["few"] * 4
    for some in (x[:3], x):
        strided = torch.stack([some, some], 2)[..., 1]
        assert_equal_bits(product(strided, operands, text, cols), product(some, operands, text, cols))


@for_each("text, bad", [("2:8", 0xFF), ("1:32", 0x20), ("3:5", 0xFF)])
def test_a_damaged_index_contributes_nothing(text, bad, device):
    p = Pattern(text)
    values, indices, step = integer_weight(text, 5, 16 * p.m, 8)
    broken, without, per = indices.clone(), values.clone(), 8 // p.index_bits
    broken[2, 1] = bad
    without[2, per : 2 * per] = 0
    for count in (2, 7):
        x = tokens_of(count, 16 * p.m, BF16)
        left = product(x, on(device, (values, broken, step)), text, 16 * p.m)
        assert_equal_bits(left, product(x, on(device, (without, indices, step)), text, 16 * p.m))


def test_sizes_of_nothing(device):
    operands, no_rows = on(device, integer_weight("2:4", 6, 8, 8)), on(device, integer_weight("2:4", 0, 8, 4))
    assert product(torch.randn(3, 0, 8), operands, "2:4", 8).shape == (3, 0, 6)
    assert product(torch.randn(8), operands, "2:4", 8).shape == (6,)
    for count in (2, 6, 20):
        assert product(torch.randn(count, 8).to(BF16), no_rows, "2:4", 8).shape == (count, 0)
    none, bias = [t[:, :0] for t in operands[:2]], torch.randn(6)
    y = product(torch.randn(2, 0), [*none, operands[2]], "2:4", 0, bias)
    assert_equal_bits(y, bias.expand(2, 6).contiguous())


@for_each("bits", [8, 4])
@for_each("dtype", [F32, BF16, F16])
def test_dequantize(dtype, bits, device):
    for rows, kept, steps in ((1, 1, 1), (3, 15, 1), (5, 15, 5), (2, 128, 4), (3, 1000, 8), (0, 8, 2), (40, 64, 1), (2, 4100, 1)):
        gen = torch.Generator().manual_seed(kept)
        values = reference.pack_integers(torch.randint(-8, 8, (rows, kept), generator=gen).to(torch.int8), bits)
        step = torch.randn(rows, steps, generator=gen).to(BF16)
        step[: rows // 2] *= 1e-38
        out = fill_poison(torch.empty(rows, kept, dtype=dtype, device=device))
        family.dequantize_values(values.to(device), step.to(device), kept, dtype, out=out)
        assert_equal_bits(out, reference.dequantize_values(values, step, kept, dtype))
    largest = reference.dequantize_values(torch.full((1, 8), -127, dtype=torch.int8), torch.full((1, 1), 600.0, dtype=BF16), 8, dtype)
    values, step = torch.full((1, 8), -127, dtype=torch.int8, device=device), torch.full((1, 1), 600.0, dtype=BF16, device=device)
    assert_equal_bits(family.dequantize_values(values, step, 8, dtype), largest)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@for_each("bits", [8, 4])
def test_quantize(dtype, bits, device):
    for kept, steps in ((1, 1), (15, 3), (66, 1), (40, 2)):
        w = hard(24, kept).to(dtype)
        with poison():
            got = family.quantize_values(w.to(device), bits, steps)
        assert_equal_bits(got, reference.quantize_values(w, bits, steps))
    halves = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 63.5]])
    # the step −1 would be better than 1, but the first of the largest is negative
    both = torch.randint(-7, 8, (8, 130))
    both[:, 3], both[:, 100:102] = -8, 8
    for w in (halves.to(dtype), both.to(dtype)):
        assert_equal_bits(family.quantize_values(w.to(device), bits, 1), reference.quantize_values(w, bits, 1))
    for shape in ((0, 8), (2, 3, 24), (3, 0)):
        w = torch.randn(shape).to(dtype)
        assert_equal_bits(family.quantize_values(w.to(device), bits, 1), reference.quantize_values(w, bits, 1))
