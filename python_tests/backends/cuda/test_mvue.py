"""mvue in CUDA, beyond the conformance suite: groups next to every breakpoint, tiles with ragged edges, words of large counters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nmkernels import Pattern, dispatch, reference, testing
from nmkernels.reference.mvue import uniforms24
from python_tests.backends.kernel_suites import MvueSuite, Ours
from python_tests.ops.samples import seed

check = MvueSuite().check

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SMALL = ["2:4", "1:4", "2:8", "1:8", "1:16"]
ANY = ["1:2", "3:4", "2:5", "3:5", "4:8", "2:16", "4:32"]


def weights(groups: Tensor, n: int) -> Tensor:
    """p_i = min(1, |g_i| / h), sum n, in float64; n is 1 or 2."""
    a = groups.double().abs()
    s = a.sum(-1, keepdim=True)
    h = s if n == 1 else torch.minimum(s / 2, s - a.amax(-1, keepdim=True))
    return (a / h).clamp(max=1)


def at_breakpoints(p: Pattern, dtype: torch.dtype, u: Tensor) -> Tensor:
    """For each 24-bit number a group with a running sum of probabilities next to it (modulo 1): the nearest of many."""
    pool = torch.randn(60_000, p.m) * torch.logspace(0, -3, p.m, base=2)
    pool[::3] *= torch.randn(20_000, p.m).exp()
    pool = pool.to(dtype)
    sums = weights(pool, p.n).cumsum(-1)[:, :-1].remainder(1)
    order = sums.flatten().argsort()
    at = torch.searchsorted(sums.flatten()[order], u.double() / 2**24).clamp(max=len(order) - 1)
    return pool[order[at] // (p.m - 1)]


@pytest.mark.parametrize("pattern", SMALL)
def test_breakpoints(pattern: str, device: str, ours: Ours) -> None:
    """What is decided by rough arithmetic is decided rightly, and what is too near is left to the definition."""
    for dtype in [F32, BF16, F16]:
        p, words, count = Pattern(pattern), seed(21, 5), 2048
        g = at_breakpoints(p, dtype, uniforms24(words, count)).flatten()
        check(ours, g, p, -1, words, "exact", device, "along memory")
        check(ours, g.view(8, -1).t().contiguous(), p, 0, words, "exact", device, "across it")


@pytest.mark.parametrize("pattern", SMALL)
def test_few_large_tiny(pattern: str, device: str, ours: Ours) -> None:
    """Groups of zeros, of one and two numbers; sums that overflow, levels without a normal reciprocal; two that nearly saturate."""
    for dtype in [F32, BF16, F16]:
        p, info = Pattern(pattern), torch.finfo(dtype)
        x = torch.randn(64, 16 * p.m)
        zeros = torch.rand_like(x)
        cases = {
            "sparse": torch.where(zeros < 1.2 / p.m, x, torch.copysign(torch.zeros(()), x)),
            "large": x.clamp(-2, 2) * (info.max / p.m / 2),
            "tiny": x * info.tiny * 4,
            "denormal": x * info.smallest_normal * info.eps * 9,
            "one_rules": x * torch.where(zeros < 1 / p.m, 1.0, 2.0**-14),
            "two_rule": torch.where(zeros < 2 / p.m, x.sign() * (1 + info.eps * (zeros * 40).floor()), x * 2.0**-18),
            "far_apart": x * torch.where(zeros < 0.5, 1.0, 2.0**-20),
        }
        for name, g in cases.items():
            check(ours, g.to(dtype), p, -1, seed(3, 4), "exact", device, name)
            check(ours, g.to(dtype).t().contiguous(), p, 0, seed(4, 4), "exact", device, f"{name}, columns")


def test_blocks_of_two_tiles(device: str, ours: Ours) -> None:
    """From 1024 tiles on a block takes two, one after the other; here the last has one."""
    g = torch.randn(342, 374, 8, dtype=BF16)
    cpu = next(i for i in dispatch.implementations("nm_mvue") if i.backend in ("cpu", "reference"))
    got = ours("nm_mvue").fn(g.to(device), 2, 4, 1, seed(1).to(device), "exact")
    want = cpu.fn(g, 2, 4, 1, seed(1), "exact")
    testing.assert_equal_bits(got, want)
    values, indices = ours("nm_mvue_compress").fn(g.to(device), 2, 4, 1, seed(1).to(device), "exact")
    back = reference.decompress(values.cpu(), indices.cpu(), 2, 4, 374)
    testing.assert_equal_bits(back, want.movedim(1, -1).contiguous())


def test_the_first_of_all_uniforms_and_seeds_of_64_bits(device: str, ours: Ours) -> None:
    """u = 0, which the first group draws here, counts the integers that a running sum passes from 1 on, not from 0."""
    first = seed(0, 33008474)
    assert uniforms24(first, 1).item() == 0
    for p in map(Pattern, [*SMALL, "3:5"]):
        for _ in range(4):
            check(ours, torch.rand(p.m) + 0.5, p, -1, first, "exact", device)
        for words in [(-1, 2**40 + 5), (2**63 - 1, -(2**63)), (-(2**63), -2), (0x9E3779B9, 0xFFFFFFFF)]:
            check(ours, torch.randn(6, 12 * p.m), p, -1, seed(*words), "exact", device)


class TestMvue(MvueSuite):
    cases = [(q, "exact") for q in SMALL + ANY] + [("2:4", "approx"), ("2:7", "approx"), ("2:16", "approx")]
    shapes = [*MvueSuite.shapes, ((601, 8), 0)]
    wide = ["128:256", "255:256", "1:1", "1:3", "7:64", "5:100"]
    unaligned = ["2:4", "1:8", "3:5"]
