"""mask, prune and soft_threshold in Triton, beyond the conformance suite: ragged last tiles, every padding of M, unaligned memory, out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nmkernels import Pattern, _dispatch, reference, testing

OPS = ["mask", "prune", "soft_threshold"]
TILE = 2048
"""Elements of a tile, as in the kernels."""


def run(op: str, w: Tensor, p: Pattern, out: Tensor | None = None) -> Tensor:
    entry = next(i for i in _dispatch.implementations(f"nm_{op}") if i.backend == "triton")
    return entry.fn(w, p.n, p.m, out=out)


def expected(op: str, w: Tensor, p: Pattern) -> Tensor:
    return getattr(reference, op)(w.cpu(), p.n, p.m)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("pattern", ["2:4", "3:4", "1:8", "5:7", "9:24", "255:256"])
def test_ragged_tiles(op: str, pattern: str, device: str) -> None:
    p = Pattern(pattern)
    for groups in (TILE // p.m - 1, TILE // p.m + 1, 3 * TILE // p.m + 5):
        w = torch.randn(groups, p.m, dtype=torch.bfloat16)
        testing.assert_equal_bits(run(op, w.to(device), p), expected(op, w, p), f"{groups} groups")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_unaligned_memory(op: str, dtype: torch.dtype, device: str) -> None:
    p, memory = Pattern("2:4"), torch.randn(24 * 16 + 3).to(dtype)
    for start in (1, 3):
        w = memory.to(device)[start:][: 24 * 16].view(24, 16)
        room = torch.zeros(24 * 16 + 8, dtype=torch.bool if op == "mask" else dtype, device=device)
        out = room[5:][: 24 * 16].view(24, 16)
        assert run(op, w, p, out) is out
        testing.assert_equal_bits(out, expected(op, w, p))
        assert not room[:5].any() and not room[-3:].any(), "written beyond out"


@pytest.mark.parametrize("op", OPS)
def test_many_rows_of_one_group(op: str, device: str) -> None:
    """Every strided row is read where it is; two runs give the same."""
    p = Pattern("2:8")
    w = torch.randn(8, 700).to(device).t()
    first = run(op, w, p)
    testing.assert_equal_bits(first, expected(op, w, p))
    testing.assert_equal_bits(run(op, w, p), first)
