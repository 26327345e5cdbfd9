"""Weights of integers with steps in Triton: products with few tokens, decoding, rounding."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from nmkernels import Pattern
from nmkernels.backends.triton import integers as family
from nmkernels.testing import assert_equal_bits
from python_tests.backends.gemm_calls import inputs, integer_weight, product_of_integers, steps_of, unaligned
from python_tests.backends.kernel_suites import IntegersSuite
from python_tests.for_each import for_each

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
WORDS = ("2:4", "1:4", "1:8", "2:8", "4:8", "1:16", "1:32")
OTHERS = ("3:5", "7:12", "1:2", "2:32", "4:4")


class TestIntegers(IntegersSuite):
    counts, tuned = (2, 6, 20), ("2:4", "1:8", "4:8", "3:5")
    test_largest_values = None  # minutes in the interpreter

    def lost(self, text, count, dtype, met):
        """On tensor cores all of its token."""
        return met if count <= 4 or dtype == F32 or text == "3:5" else torch.ones_like(met)


@pytest.fixture
def run(ours, device):
    return partial(IntegersSuite().run, ours, device)


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
def test_products(text, bits, run):
    m = Pattern(text).m
    for rows, cols, dtype, count in ((70, 16 * m + 1, F32, 3), (9, 32 * m, BF16, 2), (70, 32 * m, BF16, 6), (20, 640, F16, 16)):
        cols = cols // m * m if cols == 640 else cols
        for steps in steps_of(Pattern(text), cols):
            product_of_integers(run, text, inputs(count, cols, dtype), integer_weight(text, rows, cols, bits, steps))


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@for_each("bits", [8, 4])
def test_every_number_of_tokens(dtype, bits, run, ran):
    operands = integer_weight("2:4", 24, 256, bits, 2)
    ran.clear()
    for count in range(1, 18):
        product_of_integers(run, "2:4", inputs(count, 256, dtype), operands, inputs(1, 24, dtype)[0])
    # float32 is multiplied four tokens at a time
    middle = ["spmm"] * 12 if dtype != F32 else ["few"] * sum(-(-count // 4) for count in range(5, 17))
    assert ran == ["few"] * 4 + middle + ["linear"]


@for_each("cols", [248, 247, 512])
def test_two_groups_in_a_byte(cols, run, ran):
    """One integer of 4 bits per group; an odd number of groups ends inside a byte."""
    ran.clear()
    for x in (inputs(6, cols, BF16), torch.eye(cols, dtype=BF16)[cols - 16 :]):
        product_of_integers(run, "1:8", x, integer_weight("1:8", 6, cols, 4))
    assert ran == ["spmm", "spmm"]


def test_split_sums(run, monkeypatch):
    """Of several tiles of columns per part and per step, the last part shorter."""
    whole = family.plan
    monkeypatch.setattr(family, "plan", lambda *args: whole(*args)._replace(splits=3))
    for bits, steps in ((8, 1), (4, 8), (4, 2)):
        operands = integer_weight("2:4", 70, 1024, bits, steps)
        product_of_integers(run, "2:4", inputs(7, 1024, BF16), operands, inputs(1, 70, BF16)[0], "silu")


@for_each("count", [2, 6, 20])
def test_weights_beyond_the_range_of_float16(count, run):
    values, indices, step = integer_weight("2:4", 6, 64, 8, 2, extreme=True)
    y = product_of_integers(run, "2:4", inputs(count, 64, F16) * 1e-3, (values, indices, torch.full_like(step, 600.0)))
    assert y.isfinite().all()


@for_each("text, bits", [("2:4", 8), ("4:8", 8), ("4:8", 4)])
def test_memory_anywhere(text, bits, run, ran):
    """Where no word holds the values of a group, or none the indices of several, values are read one by one."""
    ran.clear()
    cols = 32 * Pattern(text).m
    operands = integer_weight(text, 10, cols, bits, 2)
    p, x = Pattern(text), inputs(6, cols, BF16)
    for moved in (0, 1):
        product_of_integers(run, text, unaligned(x), [unaligned(t) if i == moved else t for i, t in enumerate(operands)])
    assert ran == ["few"] * 4
    for some in (x[:3], x):
        strided = torch.stack([some, some], 2)[..., 1]
        assert_equal_bits(run(strided, *operands, p.n, p.m, cols), run(some, *operands, p.n, p.m, cols))


@for_each("text, bad", [("2:8", 0xFF), ("1:32", 0x20), ("3:5", 0xFF)])
def test_a_damaged_index_contributes_nothing(text, bad, run):
    p = Pattern(text)
    values, indices, step = integer_weight(text, 5, 16 * p.m, 8)
    broken, without, per = indices.clone(), values.clone(), 8 // p.index_bits
    broken[2, 1] = bad
    without[2, per : 2 * per] = 0
    for count in (2, 7):
        x = inputs(count, 16 * p.m, BF16)
        rest = step, p.n, p.m, 16 * p.m
        assert_equal_bits(run(x, values, broken, *rest), run(x, without, indices, *rest))


def test_sizes_of_nothing(run):
    operands, no_rows = integer_weight("2:4", 6, 8, 8), integer_weight("2:4", 0, 8, 4)
    assert run(torch.randn(3, 0, 8), *operands, 2, 4, 8).shape == (3, 0, 6)
    assert run(torch.randn(8), *operands, 2, 4, 8).shape == (6,)
    assert product_of_integers(run, "2:4", torch.randn(2, 3, 8, dtype=BF16), operands).shape == (2, 3, 6)
    for count in (2, 6, 20):
        assert run(torch.randn(count, 8).to(BF16), *no_rows, 2, 4, 8).shape == (count, 0)
    none, bias = [t[:, :0] for t in operands[:2]], torch.randn(6)
    y = run(torch.randn(2, 0), *none, operands[2], 2, 4, 0, bias)
    assert_equal_bits(y, bias.expand(2, 6).contiguous())
