"""D = A B by mma.sp on whatever GPU, A 2:4: every tile and both ways of B, ragged sizes, parts of k, epilogues, addresses."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from nmkernels import ops, reference
from nmkernels.backends.cuda import linear as gemm
from nmkernels.testing import assert_equal_bits, assert_no_worse, fill_poison
from python_tests.backends.gemm_calls import ACTIVATIONS, as_good_as_dense, inputs, packed, unaligned

BF16, F16 = torch.bfloat16, torch.float16
LARGE, MIDDLE, SMALL = 0, 1, 2
STAGES = {LARGE: 4, MIDDLE: 3, SMALL: 4}
tiles = pytest.mark.parametrize("tile", [LARGE, MIDDLE, SMALL], ids=["large", "middle", "small"])
wide_tiles = pytest.mark.parametrize("tile", [LARGE, MIDDLE], ids=["large", "middle"])
dtypes = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)


@pytest.fixture
def use(monkeypatch):
    """``use(tile, splits)``: what the next GEMMs are planned as."""

    def plan(tile, splits=1):
        monkeypatch.setattr(gemm, "plan", lambda *_: (tile, splits))

    return plan


def multiply(values, indices, dense, by_column=False, bias=None, activation="", residual=None, out_dtype=None):
    m, k = values.shape[0], 2 * values.shape[1]
    n = dense.shape[1] if by_column else dense.shape[0]
    y = fill_poison(dense.new_empty((m, n) if by_column else (n, m), dtype=out_dtype or dense.dtype))
    return gemm.multiply(values, indices, dense, y, n, k, by_column, bias, activation, residual, by=gemm.MMA)


def check(values, indices, w, x, bias=None, activation="", residual=None, by_column=False, message=""):
    """As good as dense in the same dtype, and twice the same bits; the result."""
    y = multiply(values, indices, x, by_column, bias, activation, residual)
    as_good_as_dense(y, w, x, bias, activation, residual, by_column, message)
    assert_equal_bits(multiply(values, indices, x, by_column, bias, activation, residual), y)
    return y


@pytest.mark.quick(3)
@dtypes
@tiles
def test_every_value_is_found(device, tile, dtype, use):
    """One-hot rows return the weight to the bit: each lane's fragments, both selectors, the words of every tile in each of their orders."""
    use(tile)
    values, indices, w = packed("2:4", 192, 192, dtype, device)
    eye = torch.eye(192, dtype=dtype, device=device)
    for order in (indices, *(reference.to_layout(indices, 192, layout) for layout in ("mma.sp", "wgmma.sp"))):
        assert_equal_bits(multiply(values, order, eye) + 0.0, w.t().contiguous() + 0.0)
        if tile != SMALL:
            assert_equal_bits(multiply(values, order, eye, True) + 0.0, w + 0.0)


@pytest.mark.quick(1)
@dtypes
@tiles
def test_sizes(device, tile, dtype, use):
    """Ragged columns of D, rows that end inside a warp's tile and go on in another block, fewer slabs than stages and more, parts of k."""
    deep = [(32, 64 * slabs, 5, 1) for slabs in (1, 2, 3, STAGES[tile], STAGES[tile] + 1, 2 * STAGES[tile] + 1)]
    ragged = [(rows, cols, tokens, 1) for tokens in (1, 7, 9, 65, 130) for rows, cols in ((16, 64), (48, 128), (272, 64))]
    parts = [(48, 64 * 9, 70, splits) for splits in (2, 3, 5, 9)]
    bands = [(208, 64, 9 * 64 + 3, 1)] if tile == SMALL else []
    for rows, cols, tokens, splits in (*deep, *(ragged if dtype == BF16 else []), *parts, *bands):
        use(tile, splits)
        values, indices, w = packed("2:4", rows, cols, dtype, device)
        bias, activation = (inputs(1, rows, dtype, device)[0], "silu") if splits > 1 else (None, "")
        check(values, indices, w, inputs(tokens, cols, dtype, device), bias, activation)


@pytest.mark.quick
@dtypes
@wide_tiles
def test_by_column(device, dtype, tile, use):
    """wgrad: the dense operand as it lies, its rows ragged in whole pieces; more tiles of columns than a band has; parts of k."""
    deep = [(32, 24, 64 * slabs, 1) for slabs in (STAGES[tile], 2 * STAGES[tile] + 1)]
    sizes = [(16, 8, 64, 1), (80, 136, 128, 1), (272, 72, 192, 1), (64, 128, 320, 1), (64, 9 * 128 + 8, 64, 1), (48, 40, 64 * 9, 3)]
    for rows, cols, k, splits in deep + sizes:
        use(tile, splits)
        values, indices, w = packed("2:4", rows, k, dtype, device)
        check(values, indices, w, inputs(k, cols, dtype, device), by_column=True)


@dtypes
@wide_tiles
def test_results_that_are_not_rounded(device, dtype, tile, use):
    """wgrad of a float32 weight: the sums themselves, of one part and of several; an address where 16 bytes cannot be stored at once."""
    for rows, cols, k, splits in ((80, 136, 192, 1), (48, 40, 64 * 9, 3)):
        use(tile, splits)
        values, indices, w = packed("2:4", rows, k, dtype, device)
        x = inputs(k, cols, dtype, device)
        y = multiply(values, indices, x, True, out_dtype=torch.float32)
        as_good_as_dense(y, w, x, by_column=True)
        assert_equal_bits(y.to(dtype), multiply(values, indices, x, True))
        out = unaligned(torch.zeros_like(y))
        assert_equal_bits(gemm.multiply(values, indices, x, out, cols, k, True, by=gemm.MMA), y)
    with pytest.raises((ValueError, RuntimeError), match="by column"):
        multiply(values, indices, inputs(8, k, dtype, device), out_dtype=torch.float32)


@pytest.mark.quick(1)
@dtypes
@pytest.mark.slow
def test_epilogues(device, dtype, use):
    """Bias, activation and residual, each with and without the others; in parts too, which are finished elsewhere."""
    for activation in ACTIVATIONS:
        values, indices, w = packed("2:4", 80, 512, dtype, device)
        x, bias, residual = inputs(19, 512, dtype, device), inputs(1, 80, dtype, device, 3)[0], inputs(19, 80, dtype, device, 4)
        for i, (tile, splits) in enumerate(((LARGE, 1), (MIDDLE, 1), (SMALL, 1), (SMALL, 2))):
            use(tile, splits)
            for b, r in ((bias, residual), (bias, None), (None, residual))[: 1 + 2 * (i > 1)]:
                check(values, indices, w, x, b, activation, r, message=f"tile {tile}")


@dtypes
def test_addresses_and_strides(device, dtype, use):
    """Operands where 16 bytes cannot be copied at once, and some whose rows do not follow each other."""
    use(SMALL)
    values, indices, w = packed("2:4", 48, 128, dtype, device)
    x, bias, r = inputs(21, 128, dtype, device), inputs(1, 48, dtype, device)[0], inputs(21, 48, dtype, device)
    y = check(values, indices, w, x, bias, "gelu", r)
    meta = reference.to_layout(indices, 128, "mma.sp")
    for move in (
        unaligned,
        lambda t: t.t().contiguous().t() if t.dim() == 2 else t,
        lambda t: torch.stack([t, t], -1)[..., 0],
        lambda t: torch._neg_view(t.neg()),
    ):
        assert_equal_bits(multiply(move(values), indices, move(x), False, move(bias), "gelu", move(r)), y)
    assert_equal_bits(multiply(values, unaligned(indices), x, False, bias, "gelu", r), y)
    assert_equal_bits(multiply(values, unaligned(meta), x, False, bias, "gelu", r), y)
    out = unaligned(torch.zeros_like(y))
    assert gemm.multiply(values, meta, x, out, 21, 128, False, bias, "gelu", r) is out
    assert_equal_bits(out, y)
    use(MIDDLE)
    across = inputs(128, 40, dtype, device)
    assert_equal_bits(multiply(values, meta, unaligned(across), True), multiply(values, meta, across, True))


@tiles
def test_inf_and_nan_reach_only_what_they_meet(device, tile, use):
    """Sparse tensor cores leave out what no stored value asks for; results of other tokens have nothing to do with it."""
    use(tile)
    values, indices, w = packed("2:4", 32, 128, BF16, device)
    x, met = inputs(18, 128, BF16, device), torch.zeros(18, 32, dtype=torch.bool, device=device)
    for token, bad, column in ((0, "inf", 0), (9, "nan", 77), (17, "-inf", 127)):
        x[token, column] = float(bad)
        met[token] = w[:, column] != 0
    assert_equal_bits(~multiply(values, indices, x).isfinite(), met)
    values[3, 7] = float("nan")
    only = torch.arange(32, device=device).eq(3).expand(18, 32)
    assert_equal_bits(multiply(values, indices, inputs(18, 128, BF16, device)).isnan(), only)


def test_empty(device):
    values, indices, _ = packed("2:4", 16, 64, BF16, device)
    assert gemm.linear(inputs(0, 64, BF16, device), values, reference.to_layout(indices, 64, "mma.sp"), 2, 4, 64).shape == (0, 16)
    assert gemm.linear_wgrad(values, indices, 2, 4, 64, inputs(64, 0, BF16, device)).shape == (16, 0)
    bias = inputs(1, 16, BF16, device)[0]
    none = multiply(values[:, :0], indices[:, :0], inputs(18, 0, BF16, device), False, bias)
    assert_equal_bits(none, bias.expand(18, 16).contiguous())
    assert_equal_bits(multiply(values[:, :0], indices[:, :0], inputs(0, 16, BF16, device), True), torch.zeros(16, 16, dtype=BF16))


def test_patterns_that_are_2_of_4(device, ours):
    """Through the ops' entries, with the canonical form of the same weight for a few tokens."""
    for pattern in ["1:4", "2:8", "1:8"]:
        w = ops.prune(torch.randn(64, 128, device=device), pattern).to(BF16)
        d = ops.relayout(ops.compress(w, pattern), "mma.sp")
        x = inputs(30, 128, BF16, device).view(2, 15, 128)
        entry, args = ours("nm_linear"), (d.values, d.meta, 2, 4, 128)
        assert entry.supports(x, *args)[0] and entry.supports(x[0, :1], *args)[0]
        y = entry.fn(x, *args)
        as_good_as_dense(y, w, x)
        assert_equal_bits(entry.fn(x[1, 3:4], *args), y[1, 3:4])


def test_small_batches_stay_where_they_were(device, monkeypatch):
    """Canonical indices of up to 16 tokens are not turned into metadata; with a residual they round once."""
    monkeypatch.setattr(gemm, "multiply", lambda *_: pytest.fail("not for these"))
    for tokens in (1, 4, 16):
        values, indices, w = packed("2:4", 32, 128, BF16, device)
        x, r = inputs(tokens, 128, BF16, device), inputs(tokens, 32, BF16, device, 3)
        y = gemm.linear(x, values, indices, 2, 4, 128, None, "gelu", r)
        exact = F.gelu(x.double() @ w.double().t()) + r.double()
        assert_no_worse(y, exact.to(BF16), exact)


def test_what_it_declines(device, ours):
    fprop, wgrad = ours("nm_linear").supports, ours("nm_linear_wgrad").supports
    values, indices, _ = packed("2:4", 32, 128, BF16, device)
    x = inputs(17, 128, BF16, device)
    assert fprop(x, values, indices, 2, 4, 128)[0]
    for call, why in (
        ((x.float(), values.float(), indices, 2, 4, 128), "float32"),
        ((x, values[:24], indices[:24], 2, 4, 128), "17.*(24, 128)"),
        ((x[:, :96], values[:, :48], indices[:, :12], 2, 4, 96), "(32, 96)"),
        ((x, *packed("1:8", 32, 128, BF16, device)[:2], 1, 8, 128), "relayout"),
    ):
        can, reason = fprop(*call)
        assert not can and all(word in reason for word in why.split(".*")), reason
    good = inputs(128, 24, BF16, device)
    assert wgrad(values, indices, 2, 4, 128, good)[0]
    can, reason = wgrad(values, indices, 2, 4, 128, good[:, :20])
    assert not can and "20" in reason


def test_sizes_that_no_kernel_takes_raise(device):
    values = packed("2:4", 24, 64, BF16, device)[0]
    with pytest.raises((ValueError, RuntimeError), match="whole tiles"):
        multiply(values, torch.zeros(1, 1, 32, dtype=torch.int32, device=device), inputs(3, 64, BF16, device))


A100 = (80, 108, 163 << 10, 1410000, 1593000, 5120)
H100 = (90, 132, 227 << 10, 1980000, 2619000, 5120)
H200 = (90, 132, 227 << 10, 1980000, 3201000, 6144)
A10 = (86, 72, 99 << 10, 1695000, 6251000, 384)
SILENT = (*H200[:3], 0, 0, 0)
"""Compute capability, multiprocessors, shared memory of a block, clock and memory clock in kHz, bits of the memory's bus."""


@pytest.mark.parametrize(
    ("sizes", "by_column", "gpu", "tile", "parts"),
    [
        ((8192, 8192, 8192), False, A100, LARGE, 1),
        ((8192, 8192, 8192), True, H200, LARGE, 1),
        # by tensor cores of half the rate a slab takes 2048 cycles with the large tile, 1024 with the middle one, which is no longer
        # bound by shared memory; and the large one does not fit
        ((8192, 8192, 8192), False, A10, MIDDLE, 1),
        ((4096, 17, 4096), False, A100, SMALL, 1),
        ((1024, 64, 4096), False, A100, SMALL, 6),
        ((4096, 64, 14336), False, H200, SMALL, 2),
        ((768, 768, 8192), True, A100, MIDDLE, 3),
        ((16, 1, 64), False, H200, SMALL, 1),
        # 80 blocks, 172 slabs of 300 cycles: one part takes 172 * 300 + 656 = 52256 cycles, three 2 * (58 * 300 + 656) = 36112. Memory
        # delivers 65.5 MB in 42965 cycles on an H100, in 29294 on an H200; so much more than 36112 is not worth another launch of 5544
        ((5120, 64, 11008), False, H100, SMALL, 1),
        ((5120, 64, 11008), False, H200, SMALL, 3),
        ((5120, 64, 11008), False, A100, SMALL, 1),
        # what a GPU does not say is taken from an A100
        ((2048, 128, 8192), False, H100, SMALL, 2),
        ((2048, 128, 8192), False, SILENT, SMALL, 2),
        ((2048, 128, 8192), False, H200, MIDDLE, 8),
    ],
)
def test_plan(device, sizes, by_column, gpu, tile, parts):
    """Which tile, and whether k is cut: so that a GPU is filled, by its own rates, and what does not fit is not asked for."""
    assert gemm.core(torch.empty(0, device=device)).gemm_plan(*sizes, by_column, *gpu) == (tile, parts)


def test_the_plan_is_of_the_tensors_gpu():
    """Not of device 0, nor of the one that was planned for before."""
    core = Mock()
    core.gpu.side_effect = lambda device: (A100, H200)[device]
    core.gemm_plan.side_effect = lambda m, n, k, by_column, *gpu: gpu[:2]
    assert [gemm.plan(core, "gemm", device, 16, 1, 64, False) for device in (1, 0, -1)] == [H200[:2], A100[:2], gemm.EMULATED[:2]]
    assert [asked.args for asked in core.gpu.call_args_list] == [(1,), (0,)]
