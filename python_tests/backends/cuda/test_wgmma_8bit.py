"""D = A B by 8-bit wgmma.sp: what the host decides and tells, and the kernel's results, from its PTX, in ``python_tests.ptx``."""

from __future__ import annotations

import re
from unittest.mock import Mock

import pytest
import torch

from nmkernels import ops, reference
from nmkernels.backends.cuda import quantize as eight
from nmkernels.reference.layouts import EIGHT_BIT
from nmkernels.testing import assert_equal_bits, assert_no_worse
from python_tests.ptx.order import Hazard

from . import wgmma_calls as calls
from .test_wgmma import H100, H200, host, runs

BF16, F32 = torch.bfloat16, torch.float32
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
KINDS = [
    (E4M3, E4M3, False), (E4M3, E5M2, False), (E5M2, E5M2, False), (INT8, INT8, False), (E5M2, E5M2, True), (E5M2, E4M3, True),
]  # fmt: skip
"""Types of A and B, and whether D is stored straight."""
KERNELS = [
    (a, b, by_column, promotes, tile)
    for a, b, by_column in KINDS
    for promotes in (False, True)[: 1 if a == INT8 else 2]
    for tile in calls.EIGHT_TILES[promotes]
]


# ---- the host


@host
def test_plan():
    """Few rows of tiles fill no GPU with the large one; two sums for each result leave rows for half as many."""
    plan = calls.host().gemm_wgmma_8bit_plan
    assert plan(8192, 8192, 8192, False, *H100) == (0, 1) and plan(8192, 8192, 8192, True, *H200) == (0, 1)
    assert plan(1024, 256, 8192, True, *H100)[0] == 1
    assert plan(64, 1, 128, False, *H100)[1] == 1


@host
def test_which_kernels_there_are():
    codes, has = eight.EIGHT_BITS, calls.host().gemm_wgmma_8bit_has
    found = {(a, b, by) for a in codes for b in codes for by in (False, True) if has(codes[a], codes[b], by)}
    assert found == set(KINDS)


@host
def test_what_it_refuses():
    launch = calls.host().gemm_wgmma_8bit_launch
    for sizes, word in (
        ((96, 64, 128, False, 0), "whole tiles"),
        ((64, 64, 64, False, 0), "whole tiles"),
        ((64, 64, 0, False, 0), "whole tiles"),
        ((64, 12, 128, True, 0), "types"),
        ((64, 64, 128, False, 2), "not known"),
    ):
        with pytest.raises(ValueError, match=word if sizes[1] != 12 else "whole tiles"):
            launch(16, 32, 48, 16, 16, 0, 64, 0, 1, 4, 4, False, False, True, *sizes, 1, 132)
    with pytest.raises(ValueError, match="types"):
        launch(16, 32, 48, 16, 16, 0, 64, 0, 1, 4, 6, False, False, True, 64, 64, 128, False, 0, 1, 132)
    with pytest.raises(ValueError, match="no such result"):
        launch(16, 32, 48, 16, 16, 16, 64, 0, 0, 4, 4, False, False, True, 64, 64, 128, False, 0, 1, 132)


@host
@pytest.mark.parametrize("promotes", [False, True])
def test_maps_are_within_the_limits_of_the_driver(promotes):
    for tile in range(2):
        for by_column in (False, True):
            for m, n, k in ((64, 8, 128), (8192, 4104, 11008), (1 << 20, 1 << 20, 1 << 20)):
                maps, _, tiles, blocks, threads, shared = calls.host().gemm_wgmma_8bit_launch(
                    16, 32, 48, 16, 16, 0, 64, 0, 1, 5, 5, False, False, promotes, m, n, k, by_column, tile, 1, 132
                )
                for i, (kind, size) in ((0, (0, 1)), (6, (0, 1)), (12, (9, 2))):
                    to, inner, outer, *box, code = maps[i : i + 6]
                    calls.encode(kind, to, (inner, outer), (size * inner,), box, swizzle=calls.SPANS[code])
                assert shared <= H100[2] and threads == 384 and blocks <= min(132, 2 * tiles)


@pytest.mark.parametrize(
    ("obstacle", "there", "transposed", "word"),
    [
        ("", True, False, "by 8-bit wgmma.sp"),
        ("this GPU has 8.0", True, False, "this GPU has 8.0"),
        ("", False, False, "no kernel of torch.float8_e4m3fn by"),
        ("", True, True, "8 columns"),
    ],
)
def test_when_it_is_chosen_and_why(monkeypatch, obstacle, there, transposed, word):
    module = Mock()
    module.wgmma_obstacle.return_value, module.gemm_wgmma_8bit_has.return_value = obstacle, there
    module.gpu.return_value, module.gemm_wgmma_8bit_plan.return_value = H100, (1, 1)
    monkeypatch.setattr(eight, "core", lambda _: module)
    x, w = ops.quantize(torch.randn(20, 128), E4M3, rows=True), ops.quantize_pack(torch.randn(64, 128), E4M3)
    can, reason = eight.takes(*x, *w, None, BF16, transposed, False)
    assert word in reason and can == (word == "by 8-bit wgmma.sp")
    eight.linear_quantized(*x, *w, None, BF16, transposed, False)
    assert module.gemm_wgmma_sp_8bit.call_args.args[8:-2] == (1, 4, 4, False, True, True, 64, 20, 128, transposed, 1, 1)


# ---- the kernel


def operands(m, k, a, seed=1):
    """A packed weight and its dense form, with a step of 2^i for each row."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(m, k, generator=g) if a != INT8 else torch.randint(-127, 128, (m, k), generator=g).float()
    values, meta = reference.quantize_pack(w, torch.tensor(1.0), a)
    step = torch.exp2(torch.randint(-3, 4, (m,), generator=g).float())
    dense = reference.decompress(values.double(), reference.from_layout(meta, EIGHT_BIT), 2, 4, k) * step[:, None]
    return values, meta, step, dense


def check(kind, promotes, tile, m, n, k, mode="earliest", bias=False, dtype=BF16, splits=1, processors=4):
    a, b, by_column = kind
    g = torch.Generator().manual_seed(n)
    values, meta, step, dense = operands(m, k, a)
    x = reference.quantize(torch.randn(n, k, generator=g), torch.tensor(40.0 if b == INT8 else 1.0), b)
    x_step, biases = torch.rand(n, generator=g), torch.randn(m, generator=g).to(dtype) if bias else None
    if splits > 1 or n % 2:
        x_step = x_step[:1]
    y = calls.multiply_eight(tile, values, meta, step, x, x_step, promotes, by_column, biases, dtype, splits, mode, processors)
    args = x, x_step, values, meta, step, biases, dtype, by_column, False
    exact = (x.double() * x_step.double().reshape(-1, 1)) @ dense.T
    exact = exact if biases is None else exact + biases.double()
    assert_no_worse(y, reference.linear_quantized(*args), exact.T if by_column else exact, f"{kind} {tile} {m} {n} {k} {mode}")


@runs
@pytest.mark.parametrize(("a", "b", "by_column", "promotes", "tile"), KERNELS)
def test_every_value_is_found(a, b, by_column, promotes, tile):
    """One-hot rows return the weight to the bit: descriptors, swizzles, words, and where results and steps go."""
    values, meta, step, dense = operands(320, 256, a)
    x, x_step = torch.eye(256).to(b), torch.exp2(torch.arange(256) % 5 - 2.0)
    y = calls.multiply_eight(tile, values, meta, step, x, x_step, promotes, by_column)
    want = (dense * x_step.double()).to(BF16)
    assert_equal_bits(y, want if by_column else want.t().contiguous())


@runs
@pytest.mark.parametrize(("kind", "promotes", "tile"), [
    ((E4M3, E4M3, False), False, "wide"), ((E4M3, E5M2, False), True, "tall"), ((E5M2, E4M3, True), True, "square"),
    ((INT8, INT8, False), False, "square"),
])  # fmt: skip
def test_random_operands_of_ragged_sizes(kind, promotes, tile, mode=1):
    """Rows of a part of a tile and of a cluster, tokens that fill none, stages come round, an odd number of slabs."""
    _, cols, stages, _ = calls.EIGHT_TILES[promotes][tile]
    for m, n, k in ((64, 8, 128), (320, cols + 8, 128 * (stages + 1)), (192, 24, 128 * (2 * stages + 1))):
        check(kind, promotes, tile, m, n, k, mode=mode)
    if not kind[2]:
        check(kind, promotes, tile, 64, 2 * cols + 7, 128, mode=mode, bias=True)


@runs
@pytest.mark.parametrize("promotes", [False, True])
def test_other_results(promotes, mode="latest"):
    """fp32, and parts of k, straight and transposed."""
    for kind in (KINDS[0], KINDS[5]):
        check(kind, promotes, "square", 192, 72, 128, dtype=F32, mode=mode)
        check(kind, promotes, "square", 192, 72, 128 * 9, splits=3, mode=mode)


@runs
def test_promoted_sums_keep_what_few_bits_lose():
    """Of 14 bits a long sum of positive terms loses at each step; of what fp32 takes over every 128 products only the last bits."""
    values, meta, step, dense = operands(64, 4096, E4M3)
    values, dense = values.view(torch.uint8).bitwise_and(127).view(E4M3), dense.abs()
    x = reference.quantize(torch.rand(8, 4096, generator=torch.Generator().manual_seed(1)), torch.tensor(8.0), E4M3)
    exact = x.double() @ dense.T
    fast, promoted = (
        calls.multiply_eight("square", values, meta, step, x, torch.ones(1), promotes, dtype=F32, mode="latest", accumulator=14).double()
        for promotes in (False, True)
    )
    fast, promoted = (((y - exact) / exact).abs().max().item() for y in (fast, promoted))
    assert promoted < 2.0**-9 < 4 * promoted < fast, (promoted, fast)


BREAKS = {
    "no commit": (r"wgmma\.commit_group\S*;", "", "overwritten under wgmma|register in flight"),
    "wait_group 2 for 1": (r"(wgmma\.wait_group\S*) 1;", r"\1 2;", "overwritten under wgmma|register in flight"),
    "no wgmma.fence": (r"wgmma\.fence\S*;", "", "no wgmma.fence"),
    "sums promoted too early": (r"wgmma\.wait_group\S* 0;", "", "register in flight"),
    "words of the other half": (r"(ld\.shared\.u32\s+%r\d+, \[%r\d+\+)(\d+)\]", lambda m: f"{m[1]}{int(m[2]) ^ 512}]", "wrong result"),
    "no remote arrive": (r"(setp\.gt\.u32\s+%p\d+, %r\d+), 1;", r"\1, 0;", "deadlock"),
    "no fence.proxy.async": (r"fence\.proxy\.async\S*;", "", "not fenced for the async proxy"),
}
"""Of the kernel with promoted sums: pattern, replacement, and what is to be reported."""


@runs
@pytest.mark.parametrize("mode", ["earliest", "latest"])
@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_reported(name, mode):
    pattern, replacement, expected = BREAKS[name]
    made, times = re.subn(pattern, replacement, calls.eight_text(E4M3, E4M3, "tall", True, False))
    assert times, name
    values, meta, step, dense = operands(256, 896, E4M3)
    x = reference.quantize(torch.randn(192, 896), torch.tensor(1.0), E4M3)
    try:
        y = calls.multiply_eight("tall", values, meta, step, x, torch.ones(1), True, mode=mode, code=made)
    except Hazard as hazard:
        assert re.match(expected, str(hazard)), str(hazard)
    else:
        right = torch.allclose(y.double(), x.double() @ dense.T, rtol=0.02, atol=0.5)
        assert not right and "wrong result" in expected
