"""mvue in Triton, beyond the conformance suite: its random words, every breakpoint of the sampling, and tiles with ragged edges."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from nmkernels import Pattern, testing
from nmkernels.backends.triton import mvue
from nmkernels.backends.triton.launch import launch, next_power_of_2
from nmkernels.reference.mvue import group_mvue, philox4x32
from python_tests.backends.kernel_suites import MvueSuite
from python_tests.ops.samples import seed

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
WORD = 0xFFFFFFFF


@triton.jit
def words_kernel(seed, j, alone, fours, pairs, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    counter = tl.load(j + at)
    tl.store(alone + at, mvue.uniforms24(seed, counter))
    tl.store(fours + tl.arange(0, 4 * COUNT), mvue.uniforms24_of_four(seed, counter))
    u0, u1 = mvue.pairs24(seed, counter)
    tl.store(pairs + at * 2, u0)
    tl.store(pairs + at * 2 + 1, u1)


def test_philox_of_large_counters(device: str) -> None:
    """Counters of all 64 bits: a tensor of 2^34 elements counts its groups past 2^32."""
    for words in [(0, 0), (-1, 2**40 + 5), (2**63 - 1, -(2**63)), (-(2**63), -2), (0x9E3779B9, 0xFFFFFFFF)]:
        j = torch.tensor([0, 1, 2, 3, 7, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**33 + 6, 2**34 + 3, 2**40, 2**45 + 9, 2**60, 2**62 + 1, 5])
        got = [torch.empty(16, k, dtype=torch.int32, device=device) for k in (1, 4, 2)]
        launch(words_kernel, 1, (seed(*words).to(device), j.to(device), *got), COUNT=16)

        def block(counter: Tensor, words: tuple[int, int] = words) -> Tensor:
            key, offset = (w & 2**64 - 1 for w in words)
            high = [torch.full_like(counter, part) for part in (offset & WORD, offset >> 32)]
            return philox4x32(torch.stack([counter & WORD, (counter >> 32) & WORD, *high], -1), (key & WORD, key >> 32)) >> 8

        alone, fours, pairs = (x.cpu().long() for x in got)
        assert torch.equal(alone, block(j >> 2).gather(1, (j & 3)[:, None]))
        assert torch.equal(fours, block(j))
        assert torch.equal(pairs, block(j)[:, :2])


@triton.jit
def groups_kernel(x, u, out, M: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr):
    group, index = tl.arange(0, TILE)[:, None], tl.arange(0, PADDED)[None, :]
    tile = tl.load(x + group * M + index, mask=index < M, other=0.0)
    draws = tl.load(u + tl.arange(0, TILE))
    tl.store(out + group * M + index, mvue.estimate(tile, draws, draws, N, M, False), mask=index < M)


def breakpoints(a: Tensor, n: int) -> Tensor:
    """Uniforms at which the selection from the magnitudes ``(m,)`` changes, and their neighbours."""
    p = a / a.sum() * n
    while bool((p > 1).any()):  # water-filling in float64; a neighbourhood covers what rounding moves
        full = p >= 1
        p = torch.where(full, 1.0, a / a[~full].sum() * (n - full.sum()))
    at = (p.cumsum(0) * 2**24).round().long()
    near = at[:, None] + torch.tensor([-2, -1, 0, 1, 2])
    return torch.cat([near.flatten() % 2**24, torch.tensor([0, 1, 2**24 - 1])])


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "2:8", "1:2", "3:4", "2:5", "4:16"])
def test_breakpoints(pattern: str, device: str) -> None:
    for dtype in [F32, BF16, F16]:
        p = Pattern(pattern)
        groups, draws = [], []
        for scale in (1.0, 1e-6, 3e4 / p.m):
            for spread in (0, 4, 14):
                g = torch.randn(p.m) * torch.logspace(0, -spread, p.m, base=2) * scale
                g[p.n + 2 + spread // 8 :] = 0.0  # the last one that is open takes what is left, wherever it is
                u = breakpoints(g.to(dtype).double().abs(), p.n)
                groups.append(g.to(dtype).expand(len(u), p.m))
                draws.append(u)
        x, u = torch.cat(groups), torch.cat(draws)
        rows = next_power_of_2(len(u))
        x = torch.cat([x, x.new_zeros(rows - len(u), p.m)]).contiguous()
        u = torch.cat([u, u.new_zeros(rows - len(u))])
        want = group_mvue(x, u, p.n)
        out = torch.empty_like(x, device=device)
        memory = out.view(torch.int32 if dtype == F32 else torch.int16)
        consts = {"M": p.m, "N": p.n, "TILE": rows, "PADDED": next_power_of_2(p.m)}
        launch(groups_kernel, 1, (x.to(device), u.int().to(device), memory), **consts)
        testing.assert_equal_bits(out, want)


class TestMvue(MvueSuite):
    cases = [*((q, "exact") for q in ("2:4", "1:4", "2:8", "1:2", "3:5", "2:16")), ("2:4", "approx")]
    shapes = [*MvueSuite.shapes, ((144, 66), 0)]
    wide, lines = ["128:256", "1:1", "7:64"], 9
