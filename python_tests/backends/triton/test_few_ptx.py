"""The product of 1 to 4 tokens as compiled for sm_80 and sm_90, run on the CPU by ``python_tests.ptx``: barriers, layouts and banks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nmkernels import Pattern, reference
from nmkernels.backends.triton import interpreted
from nmkernels.backends.triton._few import few
from nmkernels.backends.triton._few_tiles import cut
from nmkernels.testing import assert_no_worse, fill_poison

if interpreted():
    pytest.skip("TRITON_INTERPRET=1 compiles nothing", allow_module_level=True)

from python_tests.ptx import emulated, exchange

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def product(text, dtype, tokens, rows, cols, tile, capability, damaged=False):
    """Run it, its warps as far apart as barriers let them, against float64."""
    p, gen = Pattern(text), torch.Generator().manual_seed(1)
    values, indices = reference.compress(torch.randn(rows, cols, generator=gen).to(dtype), p.n, p.m)
    without, broken = values.clone(), indices.clone()
    if damaged:
        without[rows - 1, 3] = 0
        broken.view(rows, -1)[rows - 1, 3 * p.index_bits // 8] |= (2**p.index_bits - 1) << (3 * p.index_bits % 8)
    w = reference.decompress(without, indices, p.n, p.m, cols)
    x, bias = torch.randn(tokens, cols, generator=gen).to(dtype), torch.randn(rows, generator=gen).to(dtype)
    y = fill_poison(torch.empty(tokens, rows, dtype=dtype))
    with emulated(capability, warps_apart=True) as ran:
        few(x, values, broken, p.n, p.m, cols, bias, "silu", y, tile)
    exact = F.silu(F.linear(x.double(), w.double(), bias.double()))
    assert_no_worse(y, F.silu(F.linear(x, w, bias)), exact, f"{text} {dtype} {tile} sm_{capability}")
    return ran


CASES = [
    # text, dtype, tokens, cols, lanes, chunks, ahead, splits; two steps and a piece of one where cols do not divide
    ("2:4", BF16, 1, 1024, 8, 4, False, 1),
    ("2:4", BF16, 3, 1024 + 64, 8, 4, True, 3),
    ("2:4", F32, 4, 512 + 32, 8, 2, True, 1),
    ("1:8", F16, 2, 2048 + 64, 4, 4, False, 2),
    ("1:32", BF16, 4, 4096, 4, 1, True, 1),
]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("text", "dtype", "tokens", "cols", "lanes", "chunks", "ahead", "splits"), CASES, ids=str)
def test_staged(text, dtype, tokens, cols, lanes, chunks, ahead, splits, capability):
    p = Pattern(text)
    tile = cut(dtype.itemsize, p.n, p.m, cols, lanes, chunks, 2, ahead, splits)
    assert tile.staged
    ran = product(text, dtype, tokens, 9, cols, tile, capability)
    assert ran == ["few_kernel", "combine_kernel"][: 1 + (splits > 1)]


@pytest.mark.parametrize(("text", "kernel"), [("1:8", "few_kernel"), ("3:5", "few_careful_kernel")])
def test_a_damaged_index(text, kernel):
    assert product(text, BF16, 2, 9, 40 * Pattern(text).m, None, 90, damaged=True)[0] == kernel


@pytest.mark.parametrize("text", ["2:4", "1:4", "1:8", "2:8"])
def test_no_two_threads_meet_in_a_bank(text, monkeypatch):
    """Reading x takes one turn of shared memory for 32 values: no two of 32 threads read different words of one bank."""
    load, turns = exchange._load_shared, []

    def counting(t, where, bits, count, text):
        if bits == 32 and count == 1 and len(where) == 32:
            words = np.unique(where // 4)
            turns.append(np.bincount((words % 32).astype(np.int64)).max())
        return load(t, where, bits, count, text)

    monkeypatch.setattr(exchange, "_load_shared", counting)
    p, cols = Pattern(text), 2048
    tile = cut(2, p.n, p.m, cols, 8 if p.m == 4 else 4, 4, 4, False, 1)
    product(text, BF16, 1, tile.rows, cols, tile, 90)
    assert len(turns) >= tile.rows * p.kept(cols) // 32
    assert max(turns) == 1
