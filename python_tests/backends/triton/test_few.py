"""y = x Wᵀ + b for 1 to 4 tokens: every pattern, both ways through the kernel, and what is nasty about memory and numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nmkernels import Pattern, reference
from nmkernels.backends.triton._few import few
from nmkernels.backends.triton._few_tiles import PROCESSORS, Tile, plan
from nmkernels.testing import assert_equal_bits, assert_no_worse, fill_poison
from python_tests.backends.product_calls import ACTIVATIONS, PATTERNS, every_dtype, inputs, packed


def run(x, values, indices, text, bias=None, activation="", tile=None):
    y, p = fill_poison(x.new_empty(x.shape[0], values.shape[0])), Pattern(text)
    few(x, values, indices, p.n, p.m, x.shape[1], bias, activation, y, tile)
    return y


def cut(text, dtype, rows, cols, tokens=1, **changes):
    """The plan of a product with some of it changed, and steps and splits that fit again."""
    p = Pattern(text)
    t = plan(dtype.itemsize, p.n, p.m, rows, cols, tokens)._replace(**changes)
    t = t._replace(rows=t.warps * 32 // t.lanes)
    steps = -(-p.kept(cols) // (t.chunks * t.lanes * 16 // dtype.itemsize))
    return t._replace(steps=-(-steps // t.splits))


@every_dtype
@pytest.mark.parametrize("text", PATTERNS)
def test_is_as_good_as_dense(device, text, dtype):
    m = Pattern(text).m
    for tokens, rows, cols in ((1, 37, 24 * m), (2, 1, 8 * m), (3, 9, max(16, 160 // m) * m), (4, 16, 9 * m - 1)):
        values, indices, w = packed(text, rows, cols, dtype, device)
        x, bias = inputs(tokens, cols, dtype, device), inputs(1, rows, dtype, device)[0]
        b, activation = (bias, ("", "silu", "relu2", "gelu")[tokens - 1]) if rows > 1 else (None, "")
        f = ACTIVATIONS[activation]
        exact = f(F.linear(*(None if t is None else t.double() for t in (x, w, b))))
        y = run(x, values, indices, text, b, activation)
        assert_no_worse(y, f(F.linear(x, w, b)), exact, f"{tokens} tokens, {rows} x {cols}, {activation}")


CUTS = [
    # text, dtype, tokens, cols, ahead, chunks, splits; steps of 64 values in 2:4 and 32 in 1:8 for each chunk, half of that in float32
    ("2:4", torch.bfloat16, 1, 1024, False, 4, 1),
    ("2:4", torch.bfloat16, 3, 1024 + 64, False, 4, 3),
    ("2:4", torch.bfloat16, 2, 1024, True, 4, 2),
    ("2:4", torch.float32, 4, 512 + 32, True, 2, 3),
    ("1:8", torch.bfloat16, 1, 2048 + 64, True, 4, 2),
    ("1:8", torch.float16, 3, 1024, False, 1, 2),
    ("4:8", torch.float32, 2, 512 + 128, False, 8, 1),
    ("1:32", torch.bfloat16, 4, 4096, True, 1, 2),
]


@pytest.mark.parametrize("text, dtype, tokens, cols, ahead, chunks, splits", CUTS, ids=str)
def test_however_it_is_cut(device, text, dtype, tokens, cols, ahead, chunks, splits):
    """A step ahead or not, in parts or whole, with steps that pass the end and steps that do not; twice the same bits."""
    rows = 17 if text == "1:8" else 9
    values, indices, w = packed(text, rows, cols, dtype, device)
    x, bias = inputs(tokens, cols, dtype, device), inputs(1, rows, dtype, device)[0]
    tile = cut(text, dtype, rows, cols, tokens, ahead=ahead, chunks=chunks, splits=splits)
    assert tile.staged
    exact = F.silu(F.linear(x.double(), w.double(), bias.double()))
    y = run(x, values, indices, text, bias, "silu", tile)
    assert_no_worse(y, F.silu(F.linear(x, w, bias)), exact, f"{tile}")
    assert_equal_bits(run(x, values, indices, text, bias, "silu", tile), y)
    careful = run(x, values, indices, text, bias, "silu", tile._replace(staged=False))
    assert_no_worse(careful, y, exact, "the careful way")


@pytest.mark.parametrize("text", PATTERNS)
def test_every_column_is_found(device, text):
    """One-hot inputs return the weight to the bit, so that every thread's choice shows."""
    dtype, cols = torch.bfloat16, 3 * Pattern(text).m * 8
    values, indices, w = packed(text, 11, cols, dtype, device)
    eye = torch.eye(cols, dtype=dtype, device=device)
    for first in (0, cols // 2, cols - 4):
        x = eye[first : first + 4]
        assert_equal_bits(run(x, values, indices, text) + 0.0, w[:, first : first + 4].t().contiguous() + 0.0)


@pytest.mark.parametrize("text", PATTERNS)
def test_inf_and_nan_reach_only_what_they_meet(device, text):
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


@pytest.mark.parametrize("text", ["1:2", "1:8", "2:8", "3:5", "4:32", "5:12"])
def test_a_damaged_index_adds_nothing(device, text):
    """x is NaN except where the other values of the row point, so that a read of anything else would show."""
    p, rows, tokens = Pattern(text), 9, 2
    cols = 40 * p.m
    values, indices, _ = packed(text, rows, cols, torch.bfloat16, device)
    per_byte = 8 // p.index_bits
    for row, k, ahead in ((0, 0, True), (8, 17, False), (5, p.kept(cols) - 1, True)):
        broken, without, poisoned = indices.clone(), values.clone(), values.clone()
        broken[row, k // per_byte] |= (2**p.index_bits - 1) << (k % per_byte * p.index_bits)
        without[row, k], poisoned[row, k] = 0.0, float("inf")
        w = reference.decompress(without, indices, p.n, p.m, cols)
        x = inputs(tokens, cols, torch.bfloat16, device)
        tile = cut(text, torch.bfloat16, rows, cols, tokens, ahead=ahead, chunks=1)  # several steps
        y = run(x, poisoned, broken, text, tile=tile)
        assert_no_worse(y, F.linear(x, w), F.linear(x.double(), w.double()), f"row {row}, value {k}")
        x[:, w[row] == 0] = float("nan")
        assert run(x, poisoned, broken, text, tile=tile)[:, row].isfinite().all()


@pytest.mark.parametrize("text", ["2:4", "1:8", "3:5"])
def test_unaligned_memory(device, text):
    def moved(t):
        room = t.new_empty(t.numel() + 1)
        room[1:] = t.flatten()
        return room[1:].view(t.shape)

    cols = 24 * Pattern(text).m
    values, indices, _ = packed(text, 6, cols, torch.bfloat16, device)
    x, bias = inputs(3, cols, torch.bfloat16, device), inputs(1, 6, torch.bfloat16, device)[0]
    y = run(x, values, indices, text, bias)
    assert_equal_bits(run(*(moved(t) for t in (x, values, indices)), text, moved(bias)), y)


def test_large_terms_that_cancel(device):
    values, indices, w = packed("2:4", 24, 4096, torch.bfloat16, device)
    x = inputs(1, 4096, torch.bfloat16, device)
    x[:, ::2] *= 1000
    y = run(x, values, indices, "2:4")
    assert_no_worse(y, F.linear(x, w), F.linear(x.double(), w.double()))


SIZES = [(r, c) for r in (1, 256, 1024, 4096, 11008, 28672, 128256) for c in (64, 96, 4096, 11008, 28672)]


@pytest.mark.parametrize("text", PATTERNS)
@pytest.mark.parametrize("size", [2, 4])
def test_plans_cover_every_value_and_fit(text, size):
    p = Pattern(text)
    for rows, cols in SIZES:
        for tokens in (1, 2, 3, 4):
            t = plan(size, p.n, p.m, rows, cols, tokens)
            step = t.chunks * t.lanes * 16 // size
            assert (t.splits - 1) * t.steps * step < p.kept(cols) <= t.splits * t.steps * step
            assert t.chunks * t.lanes * 16 // size * p.m // p.n * (4 if tokens == 3 else tokens) <= 4096 or t.chunks == 1
            assert t.rows * t.lanes == t.warps * 32
            assert t.splits == 1 or (-(-rows // t.rows) < PROCESSORS and t.steps >= 2)


def test_plans_of_the_sizes_that_matter():
    """4096 x 4096 fills an H200 in one kernel, with a step ahead; large weights have tiles enough to go without."""
    small, large = plan(2, 2, 4, 4096, 4096, 1), plan(2, 2, 4, 28672, 8192, 1)
    assert small == Tile(staged=True, rows=8, chunks=8, lanes=8, warps=2, ahead=True, steps=4, splits=1)
    assert large == Tile(staged=True, rows=16, chunks=4, lanes=8, warps=4, ahead=False, steps=16, splits=1)
    assert plan(2, 1, 8, 11008, 4096, 4).splits == 1
    assert plan(2, 2, 4, 512, 11008, 1).splits > 1
    assert not plan(2, 2, 4, 4096, 4100, 1).staged
    assert not plan(2, 3, 5, 4096, 4000, 1).staged
