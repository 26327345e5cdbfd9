"""Weights of integers with steps: decoding, and products with few tokens and with many."""

from __future__ import annotations

import pytest
import torch

from nmkernels import Pattern, reference
from nmkernels.backends.cuda import integers, linear
from nmkernels.backends.cuda.core import core
from nmkernels.testing import assert_equal_bits, assert_no_worse
from python_tests.backends.gemm_calls import inputs, integer_weight, product_of_integers, unaligned
from python_tests.backends.kernel_suites import IntegersSuite

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
PATTERNS = ("2:4", "1:4", "1:8", "2:8", "4:8", "1:16", "3:5", "4:4", "7:12", "2:32")


def check(ours, text, x, operands, *rest, what=""):
    """As good as the reference in x's dtype, and twice the same bits; the result."""
    call, p = ours("nm_linear_integers").fn, Pattern(text)
    y = product_of_integers(call, text, x, operands, *rest, what=what)
    assert_equal_bits(call(x, *operands, p.n, p.m, x.shape[-1], *rest), y, what)
    return y


def kernels(x, operands, text, processors=2):
    """The kernels of the launches of a call in the emulator."""
    p, (values, _, step) = Pattern(text), operands
    sizes = values.shape[0], x.shape[-1], p.n, p.m, integers.BITS[values.dtype], step.shape[-1], processors
    return {kernel for kernel, *_ in integers._plan(core(x), x.dtype, x.shape[0], True, sizes)}


class TestIntegers(IntegersSuite):
    counts, tuned, longest = (1, 6), ("2:4", "1:4", "1:8", "3:5"), 1024
    test_quantize = None  # left to the reference

    def lost(self, text, count, dtype, met):
        """On dense tensor cores all of its token."""
        return met if count <= 4 or dtype == F32 or text == "2:4" else torch.ones_like(met)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("text", PATTERNS)
def test_few_tokens(device, ours, text, bits):
    """Columns that end inside a group, odd numbers of kept values, one step and several."""
    m = Pattern(text).m
    for dtype in [BF16, F16, F32]:
        for tokens, rows, cols, steps in (
            (1, 37, 24 * m, 1), (2, 3, 9 * m - 1, 1), (3, 9, 64 * m, 4), (4, 17, 16 * m, 16), (1, 5, m, 1), (2, 33, 80 * m, 5),
        ):  # fmt: skip
            x, bias = inputs(tokens, cols, dtype, device), inputs(1, rows, dtype, device)[0]
            activation = ("", "silu", "relu2", "gelu")[tokens - 1]
            check(ours, text, x, integer_weight(text, rows, cols, bits, steps, device), bias if rows > 3 else None, activation)


@pytest.mark.quick(1, per="bits")
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_sparse_tensor_cores(device, ours, dtype, bits):
    """Every number of tokens; rows around the tiles' edges; a step per row and per group of one or more blocks of columns."""
    for tokens in range(1, 17):
        rows, cols = (1, 16, 37, 130)[tokens % 4], (128, 384, 1024)[tokens % 3]
        for steps in {1, cols // 128, cols // 256 or 1}:
            operands, x = integer_weight("2:4", rows, cols, bits, steps, device), inputs(tokens, cols, dtype, device)
            if device == "cpu" and tokens <= 16 and cols % (128 * steps) == 0:
                assert kernels(x, operands, "2:4") == {"linear_integers"}
            if tokens <= 16:
                check(ours, "2:4", x, operands, inputs(1, rows, dtype, device)[0] if tokens % 2 else None, ("", "gelu")[tokens % 2])


@pytest.mark.quick(1)
@pytest.mark.parametrize("bits", [8, 4])
def test_slices_and_parts(device, ours, bits, monkeypatch):
    """More columns than shared memory holds at a time, warps that share rows, and columns in parts."""
    for tokens, rows, cols, steps, processors, splits in (
        (16, 70, 2304, 18, 1, 1), (9, 3, 8320, 65, 64, 8), (3, 20, 4224, 1, 64, 4), (1, 18, 17408, 1, 1, 1), (5, 40, 4352, 17, 1, 1),
    ):  # fmt: skip
        monkeypatch.setattr(linear, "EMULATED", (80, processors, *linear.EMULATED[2:]))
        x, operands = inputs(tokens, cols, BF16, device), integer_weight("2:4", rows, cols, bits, steps, device)
        if device == "cpu":
            sizes = rows, cols, 2, 4, bits, steps, processors
            assert integers._plan(core(x), BF16, tokens, True, sizes) == [("linear_integers", 0, tokens, splits)]
        check(ours, "2:4", x, operands, inputs(1, rows, BF16, device)[0], "silu")


@pytest.mark.parametrize("dtype, tokens, cols", [(BF16, 1, 48_000), (F32, 7, 8000)], ids=str)
def test_columns_in_parts_on_cuda_cores(device, ours, dtype, tokens, cols, monkeypatch):
    for processors, text in ((1, "1:4"), (1, "3:5"), (64, "1:8")):
        monkeypatch.setattr(linear, "EMULATED", (80, processors, *linear.EMULATED[2:]))
        x, operands = inputs(tokens, cols, dtype, device), integer_weight(text, 3, cols, 8, 1, device)
        if device == "cpu":
            p = Pattern(text)
            launches = integers._plan(core(x), dtype, tokens, True, (3, cols, p.n, p.m, 8, 1, processors))
            assert all(splits > 1 for *_, splits in launches)
        check(ours, text, x, operands, inputs(1, 3, dtype, device)[0], "gelu", inputs(tokens, 3, dtype, device))


def test_more_tokens(device, ours):
    """Decoded once, then as the other weights are: on tensor cores, in canonical order, and in fp32 four tokens at a time."""
    for text, tokens, rows, cols, dtype in (
        ("2:4", 17, 64, 128, BF16), ("2:4", 40, 32, 192, BF16), ("1:4", 9, 20, 256, BF16), ("3:5", 16, 7, 45, BF16),
        ("1:8", 13, 20, 256, F16), ("2:4", 6, 20, 120, F32),
    ):  # fmt: skip
        operands = integer_weight(text, rows, cols, 4, 1, device)
        x, bias, residual = inputs(tokens, cols, dtype, device), inputs(1, rows, dtype, device)[0], inputs(tokens, rows, dtype, device)
        p = Pattern(text)
        entry = ours("nm_linear_integers")
        can, why = entry.supports(x, *operands, p.n, p.m, cols, bias, "gelu", residual)
        assert can, why
        y = entry.fn(x, *operands, p.n, p.m, cols, bias, "gelu", residual)
        on_cpu = [t.cpu() for t in (x, *operands, bias, residual)]
        if dtype == BF16:  # the integers are rounded to x's dtype, and what follows sees that weight
            kept = reference.dequantize_values(on_cpu[1], on_cpu[3], p.kept(cols), BF16)
            rest = (on_cpu[2], p.n, p.m, cols)
            exact = reference.linear(on_cpu[0].double(), kept.double(), *rest, on_cpu[4].double(), "gelu", on_cpu[5].double())
            theirs = reference.linear(on_cpu[0], kept, *rest, on_cpu[4], "gelu", on_cpu[5])
            assert_no_worse(y, theirs, exact, text)
        else:
            check(ours, text, x, operands, bias, "gelu", residual)


def test_shapes(device, ours):
    operands, x = integer_weight("2:4", 24, 256, 4, 2, device), inputs(6, 256, BF16, device)
    run = ours("nm_linear_integers").fn
    y = run(x, *operands, 2, 4, 256)
    assert_equal_bits(run(x.view(3, 2, 256), *operands, 2, 4, 256), y.view(3, 2, 24))
    assert_equal_bits(run(x[1], *operands, 2, 4, 256), run(x[1:2], *operands, 2, 4, 256)[0])
    wide = inputs(6, 512, BF16, device)
    wide[:, ::2] = x
    assert_equal_bits(run(wide[:, ::2], *operands, 2, 4, 256), y)
    assert_equal_bits(run(unaligned(x), *operands, 2, 4, 256), y)
    assert run(x[:0], *operands, 2, 4, 256).shape == (0, 24)
    assert run(x, *(t[:0] for t in operands), 2, 4, 256).shape == (6, 0)
    none = [t.to(device) for t in (torch.empty(5, 0, dtype=torch.int8), torch.empty(5, 0, dtype=torch.uint8), torch.ones(5, 1, dtype=BF16))]
    bias = inputs(1, 5, BF16, device)[0]
    assert_equal_bits(run(torch.empty(2, 0, dtype=BF16, device=device), *none, 2, 4, 0, bias), bias.expand(2, 5).contiguous())


@pytest.mark.parametrize("bits", [8, 4])
def test_addresses(device, ours, bits):
    """Each operand alone where 16 bytes cannot be read at once."""
    for text in ("2:4", "1:4", "1:8"):
        operands = integer_weight(text, 9, 512, bits, 2, device)
        for tokens in (3, 6):
            x = inputs(tokens, 512, BF16, device)
            for i in range(3):
                moved = [unaligned(t) if j == i else t for j, t in enumerate(operands)]
                check(ours, text, x, moved, what=f"operand {i}")


@pytest.mark.parametrize("bits", [8, 4])
def test_before_rounding(device, ours, bits):
    """An fp16 x has errors of up to 2^-15 of the largest of 128 columns; a result that is smaller than its terms shows them."""
    p, rows, cols = Pattern("2:4"), 33, 1024
    values, indices, step = operands = integer_weight("2:4", rows, cols, bits, 8, device)
    decoded = reference.dequantize_values(values.cpu(), step.cpu(), p.kept(cols), torch.float64)
    w = reference.decompress(decoded, indices.cpu(), 2, 4, cols)
    for tokens in (1, 4, 11):
        x = inputs(tokens, cols, F16, device)
        y, wide = ours("nm_linear_integers").fn(x, *operands, 2, 4, cols).cpu().double(), x.cpu().double()
        bound = 2**-13 * wide.abs().amax(1, keepdim=True) * w.norm(dim=1) + 2**-11 * (wide @ w.t()).abs() + 1e-7
        assert ((y - wide @ w.t()).abs() / bound).max() <= 1


def test_what_it_declines(device, ours):
    entry, operands = ours("nm_linear_integers"), integer_weight("2:4", 64, 128, 8, 1, device)
    assert entry.supports(inputs(40, 128, BF16, device), *operands, 2, 4, 128)[0]
    for tokens, dtype, why in ((17, F16, "range of a step"), (17, F32, "17"), (1, torch.float64, "float64")):
        x = inputs(tokens, 128, dtype, device)
        can, reason = entry.supports(x, *operands, 2, 4, 128)
        assert not can and why in reason
    can, reason = entry.supports(inputs(17, 128, BF16, device), *integer_weight("1:4", 64, 128, 8, 1, device), 1, 4, 128)
    assert not can and "1:4" in reason
    assert not ours("nm_dequantize_values").supports(operands[0], operands[2], 64, torch.float64)[0]
