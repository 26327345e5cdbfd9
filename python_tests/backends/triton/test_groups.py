"""mask, prune and soft_threshold in Triton, beyond the conformance suite: every way to rank, ragged tiles, strides, other memory, out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nmkernels import Pattern, dispatch, reference, testing

OPS = ["mask", "prune", "soft_threshold"]
TILE = 2048
"""Elements of a tile, as in the kernels."""


def run(op: str, w: Tensor, p: Pattern, out: Tensor | None = None) -> Tensor:
    entry = next(i for i in dispatch.implementations(f"nm_{op}") if i.backend == "triton")
    return entry.fn(w, p.n, p.m, out=out)


def expected(op: str, w: Tensor, p: Pattern) -> Tensor:
    return getattr(reference, op)(w.cpu(), p.n, p.m)


def some(n: int, most: int) -> list[int]:
    """1 to ``most`` and, from there to n, the middle and the ends."""
    return sorted({*range(1, min(n, most) + 1), n // 2 or 1, max(n - 1, 1), n})


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 6, 8, 11, 16, 24, 32, 33, 64, 128, 255, 256])
def test_every_way_to_rank(m: int, device: str, poison: None) -> None:
    """N from 1 to M, in 16 and 32 bits: ties, zeros of both signs, NaN and infinity in every group, and one group of each alone."""
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 1.5, -2.0, float("nan"), float("inf"), -float("inf")])
    w = torch.cat([values[torch.randint(len(values), (3, m))], values[:, None].expand(-1, m), torch.randn(2, m)])
    for n in some(m, 8 if m <= 8 else 5):
        for op, dtype in zip(OPS, [torch.float32, torch.bfloat16, torch.float32], strict=True):
            p, x = Pattern(n, m), w.to(dtype)
            testing.assert_equal_bits(run(op, x.to(device), p).cpu(), expected(op, x, p), f"{op} {p} {dtype}")
        mask = run("mask", w.bfloat16().to(device), Pattern(n, m))
        testing.assert_equal_bits(mask.cpu(), expected("mask", w.bfloat16(), Pattern(n, m)), f"mask {n}:{m} bf16")


@pytest.mark.parametrize("pattern", ["2:4", "3:4", "1:8", "5:7", "9:24", "255:256"])
def test_ragged_tiles(pattern: str, device: str) -> None:
    for op in OPS:
        p = Pattern(pattern)
        for groups in (TILE // p.m - 1, TILE // p.m + 1, 3 * TILE // p.m + 5):
            w = torch.randn(groups, p.m, dtype=torch.bfloat16)
            testing.assert_equal_bits(run(op, w.to(device), p), expected(op, w, p), f"{groups} groups")


@pytest.mark.parametrize("op", OPS)
def test_unaligned_memory(op: str, device: str) -> None:
    for dtype in [torch.float32, torch.float16]:
        p, memory = Pattern("2:4"), torch.randn(24 * 16 + 3).to(dtype)
        for start in (1, 3):
            w = memory.to(device)[start:][: 24 * 16].view(24, 16)
            room = torch.zeros(24 * 16 + 8, dtype=torch.bool if op == "mask" else dtype, device=device)
            out = room[5:][: 24 * 16].view(24, 16)
            assert run(op, w, p, out) is out
            testing.assert_equal_bits(out, expected(op, w, p))
            assert not room[:5].any() and not room[-3:].any(), "written beyond out"


def test_many_rows_of_one_group(device: str) -> None:
    """Every strided row is read where it is; two runs give the same."""
    for op in OPS:
        p = Pattern("2:8")
        w = torch.randn(8, 700).to(device).t()
        first = run(op, w, p)
        testing.assert_equal_bits(first, expected(op, w, p))
        testing.assert_equal_bits(run(op, w, p), first)


@pytest.mark.parametrize("op", OPS)
def test_strides_and_negated_views(op: str, device: str) -> None:
    for pattern in ["1:4", "3:5"]:
        p = Pattern(pattern)
        w = torch.randn(6, 8 * p.m).to(device)
        views = {
            "every second column": w[:, ::2],
            "columns from the middle": w[:, p.m : 3 * p.m],
            "rows of rows": w.view(2, 3, 8 * p.m).transpose(0, 1),
            "one row for all": w[:1].expand(5, 8 * p.m),
            "one column for all": w[:, :1].expand(6, 2 * p.m),
            "negated": torch._neg_view(w),
        }
        for name, x in views.items():
            got = run(op, x, p)
            assert got.is_contiguous() and not got.is_neg()
            testing.assert_equal_bits(got.cpu(), expected(op, x.resolve_neg(), p), name)


@pytest.mark.parametrize("op", OPS)
def test_out_is_written_whole_and_nothing_else(op: str, device: str) -> None:
    """One element past a tile, between rows that must stay as they are."""
    for pattern in ["2:4", "3:5"]:
        p = Pattern(pattern)
        groups = TILE // p.m + 1
        w = torch.randn(groups, p.m)
        room = torch.ones(3, groups, p.m, dtype=torch.bool) if op == "mask" else testing.fill_poison(torch.empty(3, groups, p.m))
        room = room.to(device)
        before = room.clone()
        assert run(op, w.to(device), p, room[1]).data_ptr() == room[1].data_ptr()
        testing.assert_equal_bits(room[1].cpu(), expected(op, w, p))
        testing.assert_equal_bits(room[::2], before[::2], "rows beside out")


@pytest.mark.parametrize("op", OPS)
def test_nothing_to_do(op: str, device: str) -> None:
    for shape in [(0,), (0, 8), (3, 0), (2, 0, 4)]:
        assert run(op, torch.zeros(shape, device=device), Pattern("2:4")).shape == shape
