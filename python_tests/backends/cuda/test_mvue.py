"""mvue in CUDA: the shared suite, numbers at the ends of their ranges, blocks of two tiles, and seeds of 64 bits."""

from __future__ import annotations

import pytest
import torch

from nmkernels import Pattern, dispatch, reference, testing
from nmkernels.backends.cuda.core import DTYPES, core, queue
from nmkernels.reference.mvue import uniforms24
from python_tests.backends.gemm_calls import unaligned
from python_tests.backends.kernel_suites import MvueSuite, Ours
from python_tests.ops.samples import seed

check = MvueSuite().check

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SMALL = ["2:4", "1:4", "2:8", "1:8", "1:16"]
ANY = ["1:2", "3:4", "2:5", "3:5", "4:8", "2:16", "4:32"]


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


@pytest.mark.slow
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


def test_whole_tiles_of_every_type(device: str, ours: Ours) -> None:
    for dtype in [F32, BF16, F16]:
        g = torch.randn(384, 64).to(dtype)
        g[5, 3], g[128:160, 7], g[130, 9] = float("nan"), 0.0, float("inf")
        check(ours, g, Pattern("2:4"), 0, seed(5, 6), "exact", device)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("layout", ["wgmma.sp", "mma.sp"])
def test_metadata_of_a_tensor_core(layout: str, dtype: torch.dtype, device: str, ours: Ours) -> None:
    """By the kernel itself where tiles are whole, several down and across; else from canonical indices. The values are the same."""
    for shape, dim in (((256, 192), 0), ((384, 64), 0), ((192, 128), 0), ((64, 128), 1), ((0, 64), 0), ((128, 0), 0)):
        g = torch.randn(shape).to(dtype)
        g[::3] = 0.0
        for stored in (g, g.t().contiguous().t(), unaligned(g)):
            want = reference.mvue_compress(stored, 2, 4, dim, seed(5, 6), "exact", layout)
            got = ours("nm_mvue_compress").fn(stored.to(device), 2, 4, dim, seed(5, 6).to(device), "exact", layout)
            testing.assert_equal_bits(got, want)
            out = tuple(testing.fill_poison(torch.empty_like(t)) for t in got)
            assert ours("nm_mvue_compress").fn(stored.to(device), 2, 4, dim, seed(5, 6).to(device), "exact", layout, out=out) is not None
            testing.assert_equal_bits(out, want)


def test_who_writes_metadata(device: str) -> None:
    """One kernel, for what training on Hopper has; nothing is written otherwise."""
    module, words = core(torch.empty(0, device=device)), seed(1).to(device)
    for dtype, sizes, approx, takes in (
        (BF16, (1, 128, 64), False, True),
        (F16, (2, 256, 128), False, True),
        (F32, (1, 128, 64), False, False),
        (BF16, (1, 64, 64), False, False),
        (BF16, (1, 128, 56), False, False),
        (BF16, (64, 128, 1), False, False),
        (BF16, (1, 128, 64), True, False),
        (BF16, (0, 128, 64), False, False),
    ):
        g = torch.randn(sizes, device=device).to(dtype)
        values, meta = g.new_zeros(g.numel() // 2), torch.zeros(g.numel() // 32, dtype=torch.int32, device=device)
        to = values.data_ptr(), meta.data_ptr(), True, *queue(g)
        assert module.mvue_compress(g.data_ptr(), DTYPES[dtype], *sizes, 2, 4, words.data_ptr(), approx, *to) == takes
        assert bool(meta.any()) == bool(values.any()) == takes


@pytest.mark.slow
def test_whole_tiles_two_for_a_block(device: str, ours: Ours) -> None:
    g = torch.randn(512, 256, 64, dtype=BF16)
    want = reference.mvue_compress(g, 2, 4, 1, seed(1), "exact")
    testing.assert_equal_bits(ours("nm_mvue_compress").fn(g.to(device), 2, 4, 1, seed(1).to(device), "exact"), want)
    g = torch.randn(1024, 8192, dtype=BF16)
    want = reference.mvue_compress(g, 2, 4, 0, seed(1), "exact", "wgmma.sp")
    testing.assert_equal_bits(ours("nm_mvue_compress").fn(g.to(device), 2, 4, 0, seed(1).to(device), "exact", "wgmma.sp"), want)


def test_the_first_of_all_uniforms_and_seeds_of_64_bits(device: str, ours: Ours) -> None:
    """u = 0, which the first group draws here, counts integers that a running sum passes from 1 on, not from 0; it is the least mark."""
    first = seed(0, 4049916)
    assert uniforms24(first, 1).item() == 0
    for p in map(Pattern, [*SMALL, "3:5"]):
        for _ in range(4):
            check(ours, torch.rand(p.m) + 0.5, p, -1, first, "exact", device)
        for words in [(-1, 2**40 + 5), (2**63 - 1, -(2**63)), (-(2**63), -2), (0x9E3779B9, 0xFFFFFFFF)]:
            check(ours, torch.randn(6, 12 * p.m), p, -1, seed(*words), "exact", device)


class TestMvue(MvueSuite):
    breakpoints = SMALL
    cases = [(q, "exact") for q in SMALL + ANY] + [("2:4", "approx"), ("2:7", "approx"), ("2:16", "approx")]
    # the last: whole tiles of 128 tokens, which need no look at edges
    shapes = [*MvueSuite.shapes, ((601, 8), 0), ((256, 128), 0)]
    wide = ["128:256", "255:256", "1:1", "1:3", "7:64", "5:100"]
    unaligned = ["2:4", "1:8", "3:5"]
