"""y = f(x Wᵀ + b) for a small batch: every pattern, every way through the kernels, and what is edge-case about memory and numbers."""

from __future__ import annotations

import pytest
import torch

from nmkernels import Pattern
from nmkernels.backends.cuda import linear as cuda
from nmkernels.testing import assert_equal_bits
from python_tests.backends.gemm_calls import every_dtype, inputs, packed, unaligned
from python_tests.backends.kernel_suites import FewTokensSuite

check, run = FewTokensSuite().check, FewTokensSuite().run


class TestFewTokens(FewTokensSuite):
    """Sizes that take the wide way in one round of a block and in several, and sizes that do not take it."""


@pytest.mark.parametrize("text", ["2:4", "1:4", "2:8", "1:8", "1:16"])
def test_tensor_cores(device, ours, text):
    """Rows around the tiles' edges, columns that end inside a step and inside a slice."""
    for dtype in [torch.bfloat16, torch.float16]:
        p, sizes = Pattern(text), ((3, 16, 64), (4, 1, 24), (5, 37, 8), (8, 20, 24), (9, 130, 8), (11, 17, 64), (15, 33, 24), (16, 5, 136))
        for tokens, rows, groups in sizes if dtype == torch.bfloat16 else sizes[::3]:
            cols = groups * p.m
            values, indices, w = packed(text, rows, cols, dtype, device)
            x, bias = inputs(tokens, cols, dtype, device), inputs(1, values.shape[0], dtype, device)[0]
            activation = ("", "gelu", "silu", "relu2")[tokens % 4]
            check(ours, x, values, indices, w, text, bias if tokens % 3 else None, activation)


@pytest.mark.quick(7)
@pytest.mark.parametrize("text", ["2:4", "4:8", "1:2", "3:5", "1:32", "4:32", "7:12", "100:256", "256:256"])
def test_any_pattern_on_tensor_cores(device, ours, text, monkeypatch):
    """Expanded in shared memory: rows of whole chunks and other rows, columns that end inside a group, parts."""
    for dtype in [torch.bfloat16, torch.float16]:
        p, sizes = Pattern(text), ((5, 33, 1, 0), (16, 1, 24, 0), (9, 40, 17, 1), (8, 3, 2100 // Pattern(text).m, 1))
        for tokens, rows, groups, short in sizes if dtype == torch.bfloat16 else sizes[2:]:
            monkeypatch.setattr(cuda, "EMULATED", (80, 16 if rows == 3 else 2, *cuda.EMULATED[2:]))
            cols = groups * p.m - short
            values, indices, w = packed(text, rows, cols, dtype, device)
            bias = inputs(1, rows, dtype, device)[0]
            check(ours, unaligned(inputs(tokens, cols, dtype, device)), unaligned(values), indices, w, text, bias, "silu")
            if text != "2:4" or short:
                check(ours, inputs(tokens, cols, dtype, device), values, indices, w, text, bias if short else None)


@pytest.mark.slow
def test_tensor_cores_in_parts(device, ours, monkeypatch):
    """With processors enough, warps share rows, and blocks columns."""
    for tokens in [5, 16]:
        for processors in (2, 8, 64):
            monkeypatch.setattr(cuda, "EMULATED", (80, processors, *cuda.EMULATED[2:]))
            values, indices, w = packed("2:4", 70, 8192 + 64, torch.bfloat16, device)
            if device == "cpu" and processors == 64:
                assert cuda._plan(cuda.core(values), torch.bfloat16, tokens, 70, 8256, 2, 4, True, 64, 163 << 10) == ("linear_mma", 4)
            x, bias = inputs(tokens, 8256, torch.bfloat16, device), inputs(1, 70, torch.bfloat16, device)[0]
            check(ours, x, values, indices, w, "2:4", bias, "silu")


@pytest.mark.parametrize(
    "dtype, tokens, cols", [(torch.bfloat16, 1, 24_000), (torch.float16, 2, 48_000), (torch.float32, 4, 6000)], ids=str
)
def test_columns_in_parts(device, ours, dtype, tokens, cols, monkeypatch):
    """What does not fit into shared memory, and what leaves a GPU idle otherwise, is cut and added up in order."""
    for processors, text in ((1, "2:4"), (1, "3:5"), (64, "2:4")):
        monkeypatch.setattr(cuda, "EMULATED", (80, processors, *cuda.EMULATED[2:]))
        values, indices, w = packed(text, 3, cols, dtype, device)
        p, bias = Pattern(text), inputs(1, 3, dtype, device)[0]
        if device == "cpu":
            assert cuda._plan(cuda.core(values), dtype, tokens, 3, cols, p.n, p.m, True, processors, 163 << 10)[1] > 1
        check(ours, inputs(tokens, cols, dtype, device), values, indices, w, text, bias, "gelu")


@every_dtype
def test_addresses_and_strides(device, ours, dtype):
    """Each operand alone where 16 bytes cannot be read at once, and inputs whose rows do not follow each other."""
    values, indices, w = packed("2:4", 9, 256, dtype, device)
    x, bias = inputs(3, 256, dtype, device), inputs(1, 9, dtype, device)[0]
    y = check(ours, x, values, indices, w, "2:4", bias)
    if dtype != torch.float32:
        check(ours, unaligned(inputs(7, 256, dtype, device)), values, indices, w, "2:4", unaligned(bias))
    check(ours, unaligned(x), values, indices, w, "2:4", unaligned(bias))
    check(ours, x, unaligned(values), indices, w, "2:4", bias)
    check(ours, x, values, unaligned(indices), w, "2:4", bias)
    wide = inputs(3, 512, dtype, device)
    wide[:, ::2] = x
    assert_equal_bits(run(ours, wide[:, ::2], values, indices, "2:4", bias), y)
    assert_equal_bits(run(ours, x.t().contiguous().t(), values, indices, "2:4", bias), y)
    assert_equal_bits(run(ours, x.view(3, 1, 256), values, indices, "2:4", bias), y.view(3, 1, 9))
    assert_equal_bits(run(ours, x[1], values, indices, "2:4", bias), run(ours, x[1:2], values, indices, "2:4", bias)[0])


def test_what_it_declines(device, ours):
    entry = ours("nm_linear")
    values, indices, _ = packed("2:4", 5, 8, device=device)
    assert entry.supports(inputs(4, 8, device=device), values, indices, 2, 4, 8)[0]
    for x, why in (
        (inputs(5, 8, device=device), "16 bits"),
        (inputs(17, 8, device=device), "17"),
        (inputs(1, 8, torch.float64, device), "float64"),
    ):
        can, reason = entry.supports(x, values.to(x.dtype), indices, 2, 4, 8)
        assert not can and why in reason
