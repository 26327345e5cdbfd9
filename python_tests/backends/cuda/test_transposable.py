"""transposable_mask in CUDA: ties of every kind, ragged blocks, unaligned memory, what it declines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nmkernels import dispatch, reference, testing
from python_tests.backends.tile_ties import ties_and_roundings

OP = "nm_transposable_mask"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Ours = Callable[[str], dispatch.Impl]
Check = Callable[..., Tensor]


@pytest.fixture
def check(device: str, ours: Ours) -> Check:
    def run(w: Tensor, out: Tensor | None = None) -> Tensor:
        got = ours(OP).fn(w.to(device), 2, 4, out)
        testing.assert_equal_bits(got.cpu(), reference.transposable_mask(w, 2, 4), f"{tuple(w.shape)} {w.dtype}")
        return got

    return run


def test_ties_and_roundings(check: Check, poison: None) -> None:
    """The first of the best, where many tie, some only after rounding, and where sums overflow or hold NaN and infinity."""
    for dtype in DTYPES:
        check(ties_and_roundings(dtype))


def test_shapes(check: Check, poison: None) -> None:
    """Blocks that are wide, tall, and ragged at both ends; rows whose length is no multiple of 16 bytes."""
    for shape in [(4, 4), (8, 12), (2, 12, 8), (4, 1024), (4, 1028), (260, 8), (1024, 4), (36, 2052), (0, 8), (3, 4, 0)]:
        for dtype in DTYPES:
            check(torch.randn(shape).to(dtype))


def test_unaligned_and_strided(check: Check) -> None:
    for dtype in DTYPES:
        check(torch.randn(16 * 24 + 1).to(dtype)[1:].view(16, 24))
        check(torch.randn(24, 50).to(dtype).t()[:48].contiguous())
        check(torch.randn(24, 16).to(dtype).t())
        check(torch._neg_view(torch.randn(8, 8).to(dtype)))


def test_out(device: str, check: Check) -> None:
    for dtype in DTYPES:
        for offset in [0, 1, 2, 4, 8]:
            w, memory = torch.randn(8, 16).to(dtype), torch.ones(200, dtype=torch.uint8, device=device)
            out = memory[offset : offset + 128].view(torch.bool).view(8, 16)
            assert check(w, out) is out
            assert memory[:offset].all() and memory[offset + 128 :].all()


def test_two_runs_are_equal(device: str, ours: Ours) -> None:
    w = torch.randn(64, 512, device=device)
    testing.assert_equal_bits(ours(OP).fn(w, 2, 4), ours(OP).fn(w, 2, 4))


def test_other_patterns_are_declined(device: str, ours: Ours) -> None:
    can, reason = ours(OP).supports(torch.randn(8, 8, device=device), 1, 4)
    assert not can and "1:4 is a matching problem" in reason
