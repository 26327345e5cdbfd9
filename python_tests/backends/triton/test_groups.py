"""mask, prune, soft_threshold, its scale and transposable_mask in Triton, beyond the conformance suite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nmkernels import Pattern, dispatch, reference, testing
from nmkernels.backends.triton.groups import ELEMENTS, TILES
from python_tests.backends.kernel_suites import ScaleSuite, TransposableSuite

OPS = ["mask", "prune", "soft_threshold"]


def run(op: str, w: Tensor, p: Pattern, out: Tensor | None = None) -> Tensor:
    entry = next(i for i in dispatch.implementations(f"nm_{op}") if i.backend == "triton")
    return entry.fn(w, p.n, p.m, out=out)


def expected(op: str, w: Tensor, p: Pattern) -> Tensor:
    return getattr(reference, op)(w.cpu(), p.n, p.m)


def some(n: int, most: int) -> list[int]:
    """1 to ``most`` and, from there to n, the middle and the ends."""
    return sorted({*range(1, min(n, most) + 1), n // 2 or 1, max(n - 1, 1), n})


@pytest.mark.quick(8)
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


@pytest.mark.parametrize("op", OPS)
def test_out_is_written_whole_and_nothing_else(op: str, device: str) -> None:
    """Tiles whole and ragged, at any address, negated."""
    for p in map(Pattern, ["2:4", "3:5", "1:8", "5:7", "9:24", "255:256"]):
        tiles, f32, bf16 = ELEMENTS // p.m, torch.float32, torch.bfloat16
        for start, groups, dtype in ((0, tiles + 1, f32), (1, tiles - 1, bf16), (3, 3 * tiles + 5, bf16)):
            size = groups * p.m
            w = torch._neg_view(torch.randn(size + start).to(dtype).to(device)[start:].view(-1, p.m))
            room = torch.zeros(size + 8, dtype=torch.bool if op == "mask" else dtype, device=device)
            out = room[start + 2 :][:size].view(w.shape)
            assert run(op, w, p, out) is out
            testing.assert_equal_bits(out.cpu(), expected(op, w.resolve_neg(), p), f"{p}, {groups} groups")
            assert not room[: start + 2].any() and not room[start + 2 + size :].any(), "written beyond out"


class TestScale(ScaleSuite):
    patterns = ["2:4", "1:1", "1:8", "3:5", "4:32", "255:256", "256:256"]
    dtypes = [torch.float32, torch.bfloat16]
    chunk, chunks = ELEMENTS * TILES, [(0, 1), (1, 1)]


class TestTransposableMask(TransposableSuite):
    # programs of 128 and 256 tiles: one less, one more, tall ones, and none
    shapes = [shape for tiles in (512, 1024) for shape in ((4, tiles - 4), (8, tiles + 4), (tiles + 4, 4), (3, tiles // 8, 20))]
    shapes += [(2, 44, 64), (2, 76, 64), (0, 8), (4, 0), (0, 4, 4), (3, 0, 8)]
