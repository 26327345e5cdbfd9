"""mvue in CUDA, beyond the conformance suite: groups next to every breakpoint, tiles with ragged edges, words of large counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nmkernels import Pattern, dispatch, reference, testing
from nmkernels.reference.mvue import uniforms24
from python_tests.ops.samples import seed

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SMALL = ["2:4", "1:4", "2:8", "1:8", "1:16"]
ANY = ["1:2", "3:4", "2:5", "3:5", "4:8", "2:16", "4:32"]
OPS = ["nm_mvue", "nm_mvue_compress"]
Ours = Callable[[str], dispatch.Impl]


def check(ours: Ours, g: Tensor, p: Pattern, dim: int, words: Tensor, method: str, device: str, what: str = "") -> None:
    """Both ops, twice, against the reference."""
    for op in OPS:
        want = getattr(reference, op.removeprefix("nm_"))(g, p.n, p.m, dim, words, method)
        for run in ("first", "second"):
            got = ours(op).fn(g.to(device), p.n, p.m, dim, words.to(device), method)
            testing.assert_equal_bits(got, want, f"{op} {what} {run} run")


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


CASES = [(q, "exact") for q in SMALL + ANY] + [("2:4", "approx"), ("2:7", "approx"), ("2:16", "approx")]


@pytest.mark.parametrize("pattern, method", CASES)
def test_shapes(pattern: str, method: str, device: str, ours: Ours) -> None:
    """Tiles that cross rows, columns and the padded tail; a number of groups that no four divide; several tiles."""
    for shape, dim in [((13, 120), 1), ((203, 67), 0), ((144, 64), 0), ((2, 45, 9), 1), ((3, 2, 240), -1), ((70, 1), 0), ((601, 8), 0)]:
        p = Pattern(pattern)
        if dim % len(shape) == len(shape) - 1 and shape[-1] % p.m:
            shape = (*shape[:-1], 15 * p.m)
        check(ours, torch.randn(shape, dtype=BF16), p, dim, seed(-3, 2**33), method, device)


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


@pytest.mark.parametrize("pattern", ["128:256", "255:256", "1:1", "1:3", "7:64", "5:100"])
def test_wide_groups(pattern: str, device: str, ours: Ours) -> None:
    for dim in [0, 1]:
        p = Pattern(pattern)
        g = torch.randn((p.m + 3, 37) if dim == 0 else (35, 2 * p.m))
        g *= torch.logspace(0, 9, g.shape[dim], base=2).unsqueeze(1 - dim)
        g[:, 0] = float("nan") if dim == 0 else 0.0
        check(ours, g, p, dim, seed(9), "exact", device)


@pytest.mark.parametrize("pattern", ["2:4", "1:8", "3:5"])
@pytest.mark.parametrize("op", OPS)
def test_unaligned_memory_and_out(op: str, pattern: str, device: str, ours: Ours) -> None:
    for dim in [0, 1]:
        for dtype in [F32, F16]:
            p, words = Pattern(pattern), seed(1, 2)
            shape = (24, 16) if pattern != "3:5" else (20, 15)
            numel = shape[0] * shape[1]
            memory = torch.randn(numel + 8).to(dtype)
            for start in (1, 3, 8):
                g = memory.to(device)[start:][:numel].view(shape)
                want = getattr(reference, op.removeprefix("nm_"))(g.cpu(), p.n, p.m, dim, words, "exact")
                wants = [want] if op == "nm_mvue" else list(want)
                rooms = [torch.zeros(x.numel() + 32, dtype=x.dtype, device=device) for x in wants]
                outs: list[Any] = [room[start + 8 :][: x.numel()].view(x.shape) for room, x in zip(rooms, wants, strict=True)]
                ours(op).fn(g, p.n, p.m, dim, words.to(device), "exact", out=outs[0] if op == "nm_mvue" else outs)
                testing.assert_equal_bits(outs, wants, str(start))
                for room, x in zip(rooms, wants, strict=True):
                    assert not room[: start + 8].any() and not room[start + 8 + x.numel() :].any(), "written beyond out"


def test_strides(device: str, ours: Ours) -> None:
    for dim in [0, 1]:
        p, words = Pattern("2:4"), seed(4, 4)
        apart = torch.stack([words, words], -1)[:, 0]
        for g in (torch.randn(24, 40).t(), torch.randn(30, 24).t(), torch.randn(30, 48)[:, ::2], torch.randn(8).expand(20, 8)):
            if dim == 1 and g.shape[1] % 4:
                continue
            for op in OPS:
                want = getattr(reference, op.removeprefix("nm_"))(g, p.n, p.m, dim, words, "exact")
                testing.assert_equal_bits(ours(op).fn(g.to(device), 2, 4, dim, apart.to(device), "exact"), want, op)


def test_empty(device: str, ours: Ours) -> None:
    for shape in [(0, 8), (8, 0), (2, 0, 8)]:
        for dim in range(len(shape)):
            check(ours, torch.empty(shape), Pattern("2:4"), dim, seed(), "exact", device)


@pytest.mark.parametrize("pattern", ["2:4", "1:8", "1:16", "3:4"])
def test_seeds_of_64_bits(pattern: str, device: str, ours: Ours) -> None:
    for words in [(-1, 2**40 + 5), (2**63 - 1, -(2**63)), (-(2**63), -2), (0x9E3779B9, 0xFFFFFFFF)]:
        check(ours, torch.randn(6, 48), Pattern(pattern), -1, seed(*words), "exact", device)


def test_the_first_of_all_uniforms(device: str, ours: Ours) -> None:
    """u = 0, which the first group draws here, counts the integers that a running sum passes from 1 on, not from 0."""
    for pattern in [*SMALL, "3:5"]:
        p, words = Pattern(pattern), seed(0, 33008474)
        assert uniforms24(words, 1).item() == 0
        for _ in range(4):
            check(ours, torch.rand(p.m) + 0.5, p, -1, words, "exact", device)
