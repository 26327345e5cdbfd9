"""transposable_mask in Triton, beyond the conformance suite: ties of every kind, ragged programs, unaligned memory, what it declines."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nmkernels import dispatch, reference, testing
from python_tests.backends.tile_ties import ties_and_roundings

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TILES = {torch.float32: 128, torch.bfloat16: 256, torch.float16: 256}
"""Tiles of one program, as in the kernel."""


def entry() -> dispatch.Impl:
    return next(i for i in dispatch.implementations("nm_transposable_mask") if i.backend == "triton")


def check(w: Tensor, device: str, out: Tensor | None = None) -> Tensor:
    got = entry().fn(w.to(device), 2, 4, out=out)
    testing.assert_equal_bits(got.cpu(), reference.transposable_mask(w, 2, 4), f"{tuple(w.shape)} {w.dtype}")
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_and_roundings(dtype: torch.dtype, device: str, poison: None) -> None:
    """The first of the best, where many tie, some only after rounding, and where sums overflow or hold NaN and infinity."""
    check(ties_and_roundings(dtype), device)


def test_a_smaller_lower_half_may_come_first(device: str) -> None:
    """Two masks below one upper half differ by less than the rounding of the whole: the first is taken, not the larger."""
    w = torch.zeros(4, 4)
    w[0, :2] = w[1, 0] = w[1, 2] = 2.0**26
    w[2, 3] = w[3, 3] = 1.0
    w[3, 1] = 0.5  # rows 2 and 3 take columns (1, 3) and (2, 3), or, worth 0.5 more, (2, 3) and (1, 3)
    want = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 1, 1]], dtype=torch.bool)
    assert torch.equal(check(w, device).cpu(), want)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_ragged_programs(dtype: torch.dtype, device: str, poison: None) -> None:
    tiles = TILES[dtype]
    for shape in (
        (4, 4 * tiles - 4),
        (8, 4 * tiles + 4),
        (4 * tiles + 4, 4),
        (3, 4 * tiles // 8, 20),
        (2, 4 * tiles // 16 + 12, 64),
    ):
        check(torch.randn(shape).to(dtype), device)


def test_unaligned_memory(device: str) -> None:
    for dtype in DTYPES[:2]:
        memory = torch.randn(12 * 24 + 3).to(dtype)
        for start in (1, 2, 3):
            room = torch.zeros(12 * 24 + 8, dtype=torch.bool, device=device)
            out = room[start:][: 12 * 24].view(12, 24)
            assert check(memory[start:][: 12 * 24].view(12, 24), device, out) is out
            assert not room[:start].any() and not room[start + 12 * 24 :].any(), "written beyond out"


def test_strides(device: str) -> None:
    check(torch.randn(24, 20).t(), device)
    check(torch.randn(16, 48)[::2, ::2], device)
    check(torch.randn(4, 1, 8).expand(4, 4, 8), device)


def test_nothing_to_do(device: str) -> None:
    for shape in [(0, 8), (4, 0), (0, 4, 4), (3, 0, 8)]:
        assert entry().fn(torch.zeros(shape, device=device), 2, 4).shape == shape


def test_other_patterns_are_declined(device: str) -> None:
    can, reason = entry().supports(torch.zeros(8, 8, device=device), 1, 4)
    assert not can and "1:4 is a matching problem, which the reference and the CPU solve" in reason
