"""mvue and mvue_compress at the edges of their fast paths, under every instruction set: outputs larger than the caches,
groups that saturate step by step, any alignment, and tails."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nmkernels import reference
from nmkernels.pattern import Pattern
from nmkernels.testing import assert_equal_bits, cases, fill_poison
from python_tests.backends.kernel_suites import MvueSuite
from python_tests.for_each import for_each

SEED = torch.tensor([2**40 + 11, -5])
STREAMED = 16 << 20  # kStreamBytes of csrc/cpu/stream.h
LOW = [torch.bfloat16, torch.float16]
every_dtype = for_each("dtype", [torch.float32, *LOW])


def gradients(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def agrees(cpu, g: Tensor, p: Pattern, dim: int, method: str = "exact", what: str = "") -> None:
    """Both ops into unclean memory against the reference."""
    args = (g, p.n, p.m, dim, SEED, method)
    out = fill_poison(torch.empty(g.shape, dtype=g.dtype))
    cpu("nm_mvue")(*args, out=out)
    assert_equal_bits(out, reference.mvue(*args), f"mvue {what} dim {dim}")
    expected = reference.mvue_compress(*args)
    room = (fill_poison(torch.empty_like(expected[0])), torch.full_like(expected[1], 255))
    cpu("nm_mvue_compress")(*args, out=room)
    assert_equal_bits(room, expected, f"mvue_compress {what} dim {dim}")


def same_in_parts(cpu, g: Tensor, p: Pattern, dim: int, compressed: bool) -> None:
    """One call on ``g`` of 2 dimensions, whose output is streamed, against a call on all rows but the last few, which is
    not, and against the reference at both ends and in the middle."""
    rows, op = g.shape[1 - dim], cpu("nm_mvue_compress" if compressed else "nm_mvue")
    few = slice(0, rows - max(1, rows // 64))
    part = (g[few] if dim else g[:, few]).contiguous()
    whole, head = op(g, p.n, p.m, dim, SEED, "exact"), op(part, p.n, p.m, dim, SEED, "exact")
    bytes_of = [(x[0] if compressed else x).nbytes for x in (whole, head)]
    assert bytes_of[0] >= STREAMED > bytes_of[1]
    dense = whole if not compressed else reference.decompress(*whole, p.n, p.m, g.shape[dim])
    if compressed:
        assert_equal_bits(tuple(x[few] for x in whole), head)
    else:
        assert_equal_bits(dense[few] if dim else dense[:, few].contiguous(), head)
    ours = dense if compressed or dim else dense.T
    for row in (0, rows // 2, rows - 1):
        groups = (g[row] if dim else g[:, row]).reshape(-1, p.m)
        words = reference.words(SEED, len(groups), row * len(groups))
        assert_equal_bits(ours[row].reshape(-1, p.m), reference.group_mvue(groups, words, p.n), f"row {row}")


@pytest.mark.quick(1)
@for_each("compressed", [False, True])
@for_each("dim", [0, 1])
@for_each("dtype", [torch.float32, torch.bfloat16])
def test_outputs_larger_than_the_caches(cpu, dtype, dim, compressed):
    rows, cols = 512, STREAMED // dtype.itemsize // 512 * (2 if compressed else 1)
    shape = (rows, cols) if dim else (cols, rows)
    same_in_parts(
        cpu,
        gradients(1, 4 * 9973, dtype=dtype).repeat(1, rows * cols // 39892 + 1)[0, : rows * cols].view(shape),
        Pattern("2:4"),
        dim,
        compressed,
    )


def test_large_outputs_of_lone_rows_and_of_any_alignment(cpu):
    """Rows that end inside a group, and an output that begins inside a line, are stored some other way."""
    p, g = Pattern("1:32"), gradients(400, 80, 1).repeat(132, 1, 1)
    memory = fill_poison(torch.empty(g.numel() + 1))
    assert g.nbytes >= STREAMED
    first, skewed = cpu("nm_mvue")(g, 1, 32, 1, SEED, "exact"), memory[1:].view(g.shape)
    cpu("nm_mvue")(g, p.n, p.m, 1, SEED, "exact", out=skewed)
    assert_equal_bits(skewed, first)
    assert memory[0].isnan()
    assert_equal_bits(first[:400], reference.mvue(g[:400], p.n, p.m, 1, SEED))
    assert_equal_bits(first[:40000], cpu("nm_mvue")(g[:40000], p.n, p.m, 1, SEED, "exact"))


@pytest.mark.slow
@every_dtype
@for_each(
    "text, method",
    [(text, "exact") for text in (["2:4", "1:4", "2:8", "1:8", "4:8", "1:16", "2:16", "1:32", "3:5", "4:4", "1:256", "7:256"])]
    + [(text, "approx") for text in ("2:2", "2:4", "2:5", "2:8", "2:16", "2:19")],
)
def test_edge_inputs(cpu, text, dtype, method):
    p = Pattern(text)
    for case in cases(text, dtype):
        for dim in range(-case.x.dim() if text in ("2:4", "1:8", "2:16", "3:5") and dtype in LOW else -1, 0):
            agrees(cpu, case.x, p, dim, method, case.id)


@pytest.mark.quick(2)
@every_dtype
@for_each("text", ["1:4", "2:4", "3:4", "4:8", "3:5", "7:12", "12:16", "16:32"])
def test_groups_that_saturate_step_by_step(cpu, text, dtype):
    """Magnitudes like 1, 2, 4, ...: each element that is kept for sure leaves a sum that makes the next one sure."""
    p = Pattern(text)
    steps = torch.rand(34, 9, p.m, generator=torch.Generator().manual_seed(7)).argsort(-1)
    for base in (1.3, 2.0, 3.0):
        g = (torch.pow(base, steps.clamp(max=24 if dtype == torch.float16 else 60)) * 2.0**-14 * gradients(34, 9, p.m).sign()).to(dtype)
        for dim in (0, 1):
            agrees(cpu, g.view(34, -1), p, dim, what=f"base {base}")


class TestMvue(MvueSuite):
    breakpoints = ["1:2", "1:4", "2:4", "4:8", "1:16", "2:16", "3:5", "5:48"]
    cases = [(text, "exact") for text in ("2:4", "3:5", "1:16", "7:256")] + [("2:4", "approx"), ("2:7", "approx")]
    shapes = [*MvueSuite.shapes, ((7, 5), 0), ((9, 4, 6), 1), ((5, 0), 0), ((33, 1), 0), ((131, 33), 0)]
    wide, unaligned = ["128:256", "1:1", "7:64", "5:100"], ["2:4", "1:8", "3:5"]
