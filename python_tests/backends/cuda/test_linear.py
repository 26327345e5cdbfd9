"""y = f(x Wᵀ + b) for a small batch: every pattern, every way through the kernels, and what is edge-case about memory and numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nmkernels import Pattern
from nmkernels.backends.cuda import linear as cuda
from nmkernels.testing import assert_equal_bits, assert_no_worse, fill_poison
from python_tests.backends.gemm_calls import ACTIVATIONS, PATTERNS, every_dtype, inputs, packed, unaligned


def run(x, values, indices, text, bias=None, activation=""):
    y, p = fill_poison(x.new_empty(*x.shape[:-1], values.shape[0])), Pattern(text)
    return cuda.linear(x, values, indices, p.n, p.m, x.shape[-1], bias, activation, out=y)


def check(x, values, indices, w, text, bias=None, activation="", message=""):
    """As good as dense in the same dtype, and twice the same bits; the result."""
    f = ACTIVATIONS[activation]
    exact = f(F.linear(*(None if t is None else t.double() for t in (x, w, bias))))
    y = run(x, values, indices, text, bias, activation)
    assert_no_worse(y, f(F.linear(x, w, bias)), exact, f"{text} {x.dtype} {tuple(x.shape)} x {values.shape[0]} {message}")
    assert_equal_bits(run(x, values, indices, text, bias, activation), y)
    return y


@every_dtype
def test_few_tokens(device, dtype):
    """Sizes that take the wide way in one round of a block and in several, and sizes that do not take it."""
    for text in PATTERNS:
        m = Pattern(text).m
        for tokens, rows, cols in ((1, 37, 24 * m), (2, 1, 8 * m), (3, 9, max(16, 160 // m) * m), (4, 16, 9 * m - 1), (2, 131, 16 * m)):
            values, indices, w = packed(text, rows, cols, dtype, device)
            bias = inputs(1, rows, dtype, device)[0]
            b, activation = (bias, ("", "silu", "relu2", "gelu")[tokens - 1]) if rows > 1 else (None, "")
            check(inputs(tokens, cols, dtype, device), values, indices, w, text, b, activation)


@pytest.mark.parametrize("text", ["2:4", "1:4", "2:8", "1:8", "1:16"])
def test_tensor_cores(device, text):
    """Rows around the tiles' edges, columns that end inside a step and inside a slice."""
    for dtype in [torch.bfloat16, torch.float16]:
        p, sizes = Pattern(text), ((3, 16, 64), (4, 1, 24), (5, 37, 8), (8, 20, 24), (9, 130, 8), (11, 17, 64), (15, 33, 24), (16, 5, 136))
        for tokens, rows, groups in sizes if dtype == torch.bfloat16 else sizes[::3]:
            cols = groups * p.m
            values, indices, w = packed(text, rows, cols, dtype, device)
            x, bias = inputs(tokens, cols, dtype, device), inputs(1, values.shape[0], dtype, device)[0]
            activation = ("", "gelu", "silu", "relu2")[tokens % 4]
            check(x, values, indices, w, text, bias if tokens % 3 else None, activation)


@pytest.mark.parametrize("text", ["4:8", "1:2", "3:5", "1:32", "4:32", "7:12", "100:256", "256:256", "2:4"])
def test_any_pattern_on_tensor_cores(device, text, monkeypatch):
    """Expanded in shared memory: rows of whole chunks and other rows, columns that end inside a group, parts."""
    for dtype in [torch.bfloat16, torch.float16]:
        p, sizes = Pattern(text), ((5, 33, 1, 0), (16, 1, 24, 0), (9, 40, 17, 1), (8, 3, 2100 // Pattern(text).m, 1))
        for tokens, rows, groups, short in sizes if dtype == torch.bfloat16 else sizes[2:]:
            monkeypatch.setattr(cuda, "EMULATED_PROCESSORS", 16 if rows == 3 else 2)
            cols = groups * p.m - short
            values, indices, w = packed(text, rows, cols, dtype, device)
            bias = inputs(1, rows, dtype, device)[0]
            check(unaligned(inputs(tokens, cols, dtype, device)), unaligned(values), indices, w, text, bias, "silu")
            if text != "2:4" or short:
                check(inputs(tokens, cols, dtype, device), values, indices, w, text, bias if short else None)


def test_tensor_cores_in_parts(device, monkeypatch):
    """With processors enough, warps share rows, and blocks columns."""
    for tokens in [5, 16]:
        for processors in (2, 8, 64):
            monkeypatch.setattr(cuda, "EMULATED_PROCESSORS", processors)
            values, indices, w = packed("2:4", 70, 8192 + 64, torch.bfloat16, device)
            if device == "cpu" and processors == 64:
                assert cuda._plan(cuda.core(values), torch.bfloat16, tokens, 70, 8256, 2, 4, True, 64) == ("linear_mma", 3)
            check(inputs(tokens, 8256, torch.bfloat16, device), values, indices, w, "2:4", inputs(1, 70, torch.bfloat16, device)[0], "silu")


@pytest.mark.parametrize(
    "dtype, tokens, cols", [(torch.bfloat16, 1, 24_000), (torch.float16, 2, 48_000), (torch.float32, 4, 6000)], ids=str
)
def test_columns_in_parts(device, dtype, tokens, cols, monkeypatch):
    """What does not fit into shared memory, and what leaves a GPU idle otherwise, is cut and added up in order."""
    for processors, text in ((1, "2:4"), (1, "3:5"), (64, "2:4")):
        monkeypatch.setattr(cuda, "EMULATED_PROCESSORS", processors)
        values, indices, w = packed(text, 3, cols, dtype, device)
        p, bias = Pattern(text), inputs(1, 3, dtype, device)[0]
        if device == "cpu":
            assert cuda._plan(cuda.core(values), dtype, tokens, 3, cols, p.n, p.m, True, processors)[1] > 1
        check(inputs(tokens, cols, dtype, device), values, indices, w, text, bias, "gelu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_column_is_found(device, dtype):
    """One-hot inputs return the weight to the bit, so that every thread's choice shows."""
    for text in PATTERNS:
        cols = 3 * Pattern(text).m * 8
        values, indices, w = packed(text, 11, cols, dtype, device)
        eye = torch.eye(cols, dtype=dtype, device=device)
        for tokens in (1, 2, 4, 8, 16):
            if tokens > 4 and dtype == torch.float32:
                continue
            for first in (0, cols // 2, cols - tokens):
                x = eye[first : first + tokens]
                assert_equal_bits(run(x, values, indices, text) + 0.0, w[:, first : first + tokens].t().contiguous() + 0.0)


@every_dtype
def test_addresses_and_strides(device, dtype):
    """Each operand alone where 16 bytes cannot be read at once, and inputs whose rows do not follow each other."""
    values, indices, w = packed("2:4", 9, 256, dtype, device)
    x, bias = inputs(3, 256, dtype, device), inputs(1, 9, dtype, device)[0]
    y = check(x, values, indices, w, "2:4", bias)
    if dtype != torch.float32:
        check(unaligned(inputs(7, 256, dtype, device)), values, indices, w, "2:4", unaligned(bias))
    check(unaligned(x), values, indices, w, "2:4", unaligned(bias))
    check(x, unaligned(values), indices, w, "2:4", bias)
    check(x, values, unaligned(indices), w, "2:4", bias)
    wide = inputs(3, 512, dtype, device)
    wide[:, ::2] = x
    assert_equal_bits(run(wide[:, ::2], values, indices, "2:4", bias), y)
    assert_equal_bits(run(x.t().contiguous().t(), values, indices, "2:4", bias), y)
    assert_equal_bits(run(x.view(3, 1, 256), values, indices, "2:4", bias), y.view(3, 1, 9))
    assert_equal_bits(run(x[1], values, indices, "2:4", bias), run(x[1:2], values, indices, "2:4", bias)[0])


def test_inf_and_nan_reach_only_what_they_meet(device):
    for text in PATTERNS:
        cols = 16 * Pattern(text).m
        values, indices, w = packed(text, 8, cols, device=device)
        x, met = inputs(3, cols, device=device), torch.zeros(3, 8, dtype=torch.bool, device=device)
        for token, (bad, column) in enumerate(((float("inf"), 0), (float("nan"), cols // 2), (float("-inf"), cols - 1))):
            x[token, column] = bad
            met[token] = w[:, column] != 0
        assert_equal_bits(~run(x, values, indices, text).isfinite(), met)
        values[3, 7] = float("nan")
        only = torch.arange(8, device=device).eq(3).expand(3, 8)
        assert_equal_bits(run(inputs(3, cols, device=device), values, indices, text).isnan(), only)


def test_activations_keep_nan_and_zero(device):
    for activation in ["gelu", "silu", "relu2"]:
        values, indices, _ = packed("2:4", 4, 8, device=device)
        bias = torch.tensor([float("nan"), 1e30, -1e30, -0.0], device=device)
        y = run(torch.zeros(1, 8, device=device), values, indices, "2:4", bias, activation)[0]
        assert_equal_bits(y.isnan(), bias.isnan())
        assert y[1] >= 1e30 and y[2].abs() == 0 and y[3] == 0


def test_empty(device):
    values, indices, _ = packed("2:4", 5, 8, device=device)
    assert run(torch.empty(0, 8, device=device), values, indices, "2:4").shape == (0, 5)
    bias = inputs(1, 5, device=device)[0]
    none = run(torch.empty(2, 0, device=device), values[:, :0], indices[:, :0], "2:4", bias)
    assert_equal_bits(none, bias.expand(2, 5).contiguous())
    assert run(torch.empty(2, 8, device=device), values[:0], indices[:0], "2:4").shape == (2, 0)


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
