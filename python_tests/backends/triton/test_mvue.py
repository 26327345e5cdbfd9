"""mvue in Triton: the shared suite, and its random words."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nmkernels.backends.triton import mvue
from nmkernels.backends.triton.launch import launch
from nmkernels.reference.mvue import philox4x32
from python_tests.backends.kernel_suites import MvueSuite
from python_tests.ops.samples import seed

WORD = 0xFFFFFFFF


@triton.jit
def words_kernel(seed, j, alone, fours, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    counter = tl.load(j + at)
    key, offset = tl.load(seed), tl.load(seed + 1)
    tl.store(alone + at, mvue.words_of(key, offset, counter))
    tl.store(fours + tl.arange(0, 4 * COUNT), mvue.words_of_four(key, offset, counter))


def test_philox_of_large_counters(device: str) -> None:
    """Counters of all 64 bits: a tensor of 2^34 elements counts its groups past 2^32."""
    for words in [(0, 0), (-1, 2**40 + 5), (2**63 - 1, -(2**63)), (-(2**63), -2), (0x9E3779B9, 0xFFFFFFFF)]:
        j = torch.tensor([0, 1, 2, 3, 7, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**33 + 6, 2**34 + 3, 2**40, 2**45 + 9, 2**60, 2**62 + 1, 5])
        got = [torch.empty(16, k, dtype=torch.int64, device=device) for k in (1, 4)]
        launch(words_kernel, 1, (seed(*words).to(device), j.to(device), *got), COUNT=16)

        def block(counter: Tensor, words: tuple[int, int] = words) -> Tensor:
            key, offset = (w & 2**64 - 1 for w in words)
            high = [torch.full_like(counter, part) for part in (offset & WORD, offset >> 32)]
            return philox4x32(torch.stack([counter & WORD, (counter >> 32) & WORD, *high], -1), (key & WORD, key >> 32))

        alone, fours = (x.cpu() for x in got)
        assert torch.equal(alone, block(j >> 2).gather(1, (j & 3)[:, None]))
        assert torch.equal(fours, block(j))


class TestMvue(MvueSuite):
    breakpoints = ["2:4", "1:4", "2:8", "1:2", "3:4", "2:5", "4:16"]
    groups = 128
    cases = [*((q, "exact") for q in ("2:4", "1:4", "2:8", "1:2", "3:5", "2:16")), ("2:4", "approx")]
    shapes = [*MvueSuite.shapes, ((144, 66), 0)]
    wide, lines = ["128:256", "1:1", "7:64"], 9
