"""D = A B by wgmma.sp: what the host decides and tells, and the kernel's results, as nvcc's PTX gives them in ``python_tests.ptx``.

What is asynchronous in it, every tile bit by bit, blocks of several tiles, and how each way to break it is found, are in
``python_tests/ptx/test_wgmma_gemm.py``.
"""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from nmkernels import dispatch, reference
from nmkernels.backends.cuda import core
from nmkernels.backends.cuda import linear as gemm
from nmkernels.testing import assert_equal_bits, fill_poison
from python_tests.backends.gemm_calls import ACTIVATIONS, as_good_as_dense, inputs, packed

from . import wgmma_calls as calls
from .wgmma_calls import BY_COLUMN, TILES

BF16, F16 = torch.bfloat16, torch.float16
host = pytest.mark.skipif(not core.emulator_built(), reason="the emulator, which has the host's part, is not built")


def runs(test):
    """Slow, and only where there is an nvcc."""
    return pytest.mark.slow(pytest.mark.skipif(bool(calls.missing()), reason=calls.missing())(test))


# ---- the host


H100 = (90, 132, 227 << 10, 1980000, 2619000, 5120)
H200 = (90, 132, 227 << 10, 1980000, 3201000, 6144)


@host
@pytest.mark.parametrize(
    ("sizes", "by_column", "gpu", "tile", "parts"),
    [
        ((8192, 8192, 8192), False, H100, "wide", 1),
        ((8192, 8192, 8192), True, H200, "wide", 1),
        # 48 clusters of the wide tile, 64 of the broad one, for 66 pairs of multiprocessors
        ((4096, 1024, 4096), False, H100, "broad", 1),
        # few tokens: no columns for nothing; by column there are no fewer than 64
        ((4096, 17, 4096), False, H100, "thin", 2),
        ((4096, 64, 14336), False, H100, "narrow", 3),
        ((4096, 16, 14336), True, H100, "narrow", 4),
        ((64, 1, 64), False, H200, "thin", 1),
    ],
)
def test_plan(sizes, by_column, gpu, tile, parts):
    assert calls.host().gemm_wgmma_plan(*sizes, by_column, *gpu) == (list(TILES).index(tile), parts)


@host
@pytest.mark.parametrize("by_column", [False, True])
def test_maps_are_within_the_limits_of_the_driver(by_column):
    """The encoder of the machine raises beyond one; sizes at their smallest, and beyond 32 bits of bytes."""
    for tile in BY_COLUMN if by_column else TILES:
        for m, n, k in ((64, 8, 64), (8192, 4104, 11008), (1 << 20, 1 << 20, 1 << 20)):
            plan = calls.host().gemm_wgmma_launch(16, 32, 48, 0, 0, 64, 0, 0, m, n, k, by_column, list(TILES).index(tile), 1, False, 132)
            for i in (0, 6, 12):
                to, inner, outer, *box, code = plan[0][i : i + 6]
                calls.encode(9, to, (inner, outer), (2 * inner,), box, swizzle=calls.SPANS[code])
            assert plan[5] <= H100[2] and plan[4] == 384


@host
def test_what_is_launched():
    """As many clusters as run at once, or as there are tiles; whole ones."""
    for m, n, splits, processors, tiles, blocks in (
        (8192, 8192, 1, 132, 16 * 43, 132),
        (512, 192, 1, 132, 1, 2),
        (576, 193, 3, 132, 2 * 2 * 3, 24),
        (8192, 8192, 1, 7, 16 * 43, 6),
        (8192, 8192, 1, 1, 16 * 43, 2),
    ):
        plan = calls.host().gemm_wgmma_launch(16, 32, 48, 0, 0, 64, 0, 0, m, n, 1024, False, 0, splits, False, processors)
        assert plan[2:4] == (tiles, blocks), (m, n, splits, processors)


@host
@pytest.mark.parametrize(
    ("sizes", "by_column", "tile", "pays"),
    [
        ((14336, 4096, 4096), False, "wide", True),  # 616 clusters of the wide tile: 9 waves of 66, and 22
        ((14336, 1024, 4096), False, "broad", True),
        ((14336, 4096, 4096), True, "wide", True),
        ((33 * 512, 192 * 4, 4096), False, "wide", False),  # two waves
        ((64, 1, 192), False, "thin", False),
    ],
)
def test_stream_k_by_its_estimate(sizes, by_column, tile, pays):
    found, floats, time = calls.host().gemm_stream_k_plan(*sizes, by_column, *H100)
    assert (time < 1) == pays
    if pays:
        assert list(TILES)[found] == tile and floats == calls.workspace(tile, *sizes, 132).numel()


@host
@pytest.mark.parametrize(
    ("m", "n", "k", "by_column", "tile", "unrounded", "word"),
    [
        (96, 64, 64, False, 0, False, "whole tiles"),
        (64, 64, 96, False, 0, False, "whole tiles"),
        (64, 64, 0, False, 0, False, "whole tiles"),
        (64, 12, 64, True, 0, False, "whole tiles"),
        (64, 64, 64, True, 4, False, "thin"),
        (64, 64, 64, False, 5, False, "not known"),
        (64, 64, 64, False, 0, True, "by column"),
        (1 << 31, 64, 64, False, 0, False, "31 bits"),
    ],
)
def test_what_it_refuses(m, n, k, by_column, tile, unrounded, word):
    with pytest.raises(ValueError, match=word):
        calls.host().gemm_wgmma_launch(16, 32, 48, 0, 0, 64, 0, 0, m, n, k, by_column, tile, 1, unrounded, 132)


@host
def test_the_emulator_never_gets_it():
    values, indices, _ = packed("2:4", 64, 128, BF16)
    assert "emulator" in gemm.not_by_wgmma(values, indices)
    with pytest.raises(RuntimeError, match="emulator"):
        calls.host().gemm_wgmma_sp(16, 32, 48, 0, 0, 64, 0, 1, 0, 64, 8, 64, False, 4, 0, 1, False, 0, 0)


@pytest.fixture
def hopper(monkeypatch):
    """The calls that reach the core of an H100 that is not there."""
    module = Mock()
    module.wgmma_obstacle.return_value = ""
    module.gpu.return_value = H100
    module.gemm_plan.return_value, module.gemm_wgmma_plan.return_value = (1, 1), (2, 1)
    monkeypatch.setattr(gemm, "core", lambda _: module)
    monkeypatch.setattr(gemm, "module_of", lambda emulated: module)
    monkeypatch.setattr(gemm, "cuda_kernels", lambda index: (True, "it runs"))
    return module


@pytest.mark.parametrize(
    ("obstacle", "order", "rows", "by_wgmma", "word"),
    [
        ("", "wgmma.sp", 64, True, "by wgmma.sp"),
        ("", "canonical", 128, True, "by wgmma.sp"),
        ("", "mma.sp", 64, False, "order of mma.sp"),
        ("", "canonical", 80, False, "64 rows"),
        ("this GPU has 8.0", "wgmma.sp", 64, False, "this GPU has 8.0"),
    ],
)
def test_which_kernel_multiplies_and_why(hopper, monkeypatch, obstacle, order, rows, by_wgmma, word):
    """wgmma.sp if the GPU, its driver and the build have it, and layout and rows fit; otherwise mma.sp, with the reason."""
    hopper.wgmma_obstacle.return_value = obstacle
    monkeypatch.setattr(gemm, "metadata", lambda i, cols, layout: reference.to_layout(i, cols, layout))
    values, indices, _ = packed("2:4", rows, 128, BF16)
    given = reference.to_layout(indices, 128, order)
    can, reason = gemm.takes(values, given, 2, 4, 128)
    assert can and word in reason
    gemm.multiply(values, given, inputs(20, 128, BF16), torch.empty(20, rows, dtype=BF16), 20, 128, False)
    called = hopper.gemm_wgmma_sp if by_wgmma else hopper.gemm_mma_sp
    assert [c.called for c in (hopper.gemm_wgmma_sp, hopper.gemm_mma_sp)] == [by_wgmma, not by_wgmma]
    warps, tile, splits = called.call_args.args[13:16]
    assert (warps, tile, splits) == ((4, 2, 1) if by_wgmma else (4 if order == "wgmma.sp" else 1, 1, 1))


INSTEAD, DIVIDED = "cuda multiplies by mma.sp itself: ", "it divides tiles of wgmma.sp: "


@pytest.mark.parametrize(
    ("by", "obstacle", "order", "rows", "time", "takes", "word"),
    [
        (gemm.MMA, "", "wgmma.sp", 64, 0, True, "by wgmma.sp"),
        (gemm.MMA, "", "canonical", 64, 0, False, "canonical"),
        (gemm.MMA, "", "mma.sp", 64, 0, False, INSTEAD + "its metadata is in the order of mma.sp"),
        (gemm.MMA, "this GPU has 8.0", "wgmma.sp", 64, 0, False, INSTEAD + "this GPU has 8.0"),
        (gemm.STREAM_K, "", "wgmma.sp", 64, 0.9, True, "along k: 0.90"),
        (gemm.STREAM_K, "", "wgmma.sp", 64, float("inf"), False, "full"),
        (gemm.STREAM_K, "", "wgmma.sp", 64, 1.5, True, "along k: 1.50"),
        (gemm.STREAM_K, "", "wgmma.sp", 4096, 1.5, False, "1.50 of the time"),
        (gemm.STREAM_K, "", "canonical", 64, 0.9, False, "canonical"),
        (gemm.STREAM_K, "", "mma.sp", 64, 0.9, False, DIVIDED + "its metadata is in the order of mma.sp"),
        (gemm.STREAM_K, "this GPU has 8.0", "wgmma.sp", 64, 0.9, False, DIVIDED + "this GPU has 8.0"),
    ],
)
def test_alternatives_are_never_chosen_unmeasured(hopper, by, obstacle, order, rows, time, takes, word):
    """mma.sp and stream-K take what wgmma.sp multiplies, at lower priorities; explain says why not.

    The estimate says whether stream-K is offered, but for small calls, which check it.
    """
    gemm.plan.cache_clear()
    hopper.wgmma_obstacle.return_value, hopper.gemm_stream_k_plan.return_value = obstacle, (0, 96, time)
    values, indices, _ = packed("2:4", rows, 128, BF16)
    given, x, g = reference.to_layout(indices, 128, order), inputs(24, 128, BF16), inputs(128, 24, BF16)
    for op, args in (("nm_linear", (x, values, given, 2, 4, 128)), ("nm_linear_wgrad", (values, given, 2, 4, 128, g))):
        can, reason = gemm._takes_by(by, op, *args)
        assert can == takes and word in reason
        entries = {i.backend: i.priority for i in dispatch.implementations(op)}
        assert entries["cuda"] > entries[gemm.MMA] > entries[gemm.STREAM_K] > entries["cusparselt"]
    if takes:
        gemm.linear(x, values, given, 2, 4, 128, by=by)
        gemm.linear_wgrad(values, given, 2, 4, 128, g, by=by)
        called, other = (hopper.gemm_mma_sp, hopper.gemm_wgmma_sp)[:: 1 if by == gemm.MMA else -1]
        assert called.call_count == 2 and not other.called
        if by == gemm.STREAM_K:
            assert [c.args[13:16] for c in called.call_args_list] == [(4, 0, 0)] * 2
            assert all(c.args[6] for c in called.call_args_list), "a workspace"


def test_where_it_runs(hopper):
    assert gemm.why_not_wgmma(torch.device("cpu")) and not gemm.why_not_wgmma(torch.device("cuda", 0))


def test_a_call_depends_on_nothing_that_a_capture_would_freeze(hopper):
    """Each call hands over the addresses of its own tensors, in host memory; the plan is made once, from sizes alone."""
    values, indices, _ = packed("2:4", 64, 192, BF16)
    meta = reference.to_layout(indices, 192, "wgmma.sp")
    for _ in range(2):
        x, y = inputs(20, 192, BF16), torch.empty(20, 64, dtype=BF16)
        gemm.multiply(values, meta, x, y, 20, 192, False)
        to = hopper.gemm_wgmma_sp.call_args.args
        assert to[:3] == (values.data_ptr(), meta.data_ptr(), x.data_ptr()) and to[5] == y.data_ptr()
    assert hopper.gemm_wgmma_plan.call_count == 1
    # nothing else of the core's is called: it neither allocates nor waits
    assert {name for name, *_ in hopper.mock_calls} <= {"gemm_wgmma_sp", "gemm_wgmma_plan", "gpu", "wgmma_obstacle"}


# ---- the kernel


def operand(rows, cols, dtype):
    values, indices, w = packed("2:4", rows, cols, dtype)
    return values, reference.to_layout(indices, cols, "wgmma.sp"), w


def check(
    tile, m, n, k, dtype=BF16, by_column=False, bias=False, activation="", residual=False, splits=1, mode="earliest", processors=4,
    by=calls.multiply, out_dtype=None,
):  # fmt: skip
    values, meta, w = operand(m, k, dtype)
    x = inputs(k, n, dtype) if by_column else inputs(n, k, dtype)
    b, r = inputs(1, m, dtype, seed=3)[0] if bias else None, inputs(n, m, dtype, seed=4) if residual else None
    y = by(tile, values, meta, x, by_column, b, activation, r, splits, mode, processors, out_dtype)
    as_good_as_dense(y, w, x, b, activation, r, by_column, f"{tile} {mode}")


@runs
@pytest.mark.parametrize("tile", TILES)
def test_random_operands_of_ragged_sizes(tile, mode=1):
    """Rows of a part of a tile and of a cluster, tokens that fill none, stages come round; more tiles than blocks, more than a band."""
    cols, stages = TILES[tile][1:3]
    for m, n, k in ((64, 1, 64), (320, cols + 9, 64 * (stages + 1)), (192, 7, 64 * (2 * stages + 1)), (64, 9 * cols + 8, 64)):
        check(tile, m, n, k, bias=m == 320, mode=mode)
    if tile in BY_COLUMN:
        for m, n, k in ((64, 8, 64), (320, cols + 72, 64 * (stages + 1)), (64, 9 * cols + 8, 64)):
            check(tile, m, n, k, F16, by_column=True, mode=mode)


@runs
def test_epilogues(mode="latest"):
    """Bias, activation, residual; parts of k, straight and transposed."""
    for i, activation in enumerate(ACTIVATIONS):
        tile = list(TILES)[i]
        check(tile, 192, 70, 128, bias=True, activation=activation, residual=True, mode=mode)
        check(tile, 128, 21, 64, F16, activation=activation, residual=not activation, mode=mode)
    check("thin", 64, 17, 64, residual=True, mode=mode)
    for tile in BY_COLUMN:
        check(tile, 192, 72, 64 * 9, by_column=True, splits=3, mode=mode)
        check(tile, 192, 70, 64 * 9, splits=3, mode=mode)


@runs
@pytest.mark.parametrize("tile", BY_COLUMN)
def test_results_that_are_not_rounded(tile, mode="latest"):
    """The gradient of a float32 weight: the sums themselves, ragged, of several tiles a block and of parts of k."""
    cols, stages = TILES[tile][1:3]
    for dtype, (m, n, k), splits in (
        (BF16, (320, cols + 72, 64 * (stages + 1)), 1),
        (F16, calls.several(TILES[tile]), 1),
        (BF16, (192, 72, 576), 3),
    ):
        check(tile, m, n, k, dtype, by_column=True, splits=splits, mode=mode, out_dtype=torch.float32)


STREAMS = {
    "one tile, a piece for every slab": ("narrow", 128, 60, 64 * 5, 5),
    "one tile, fewer slabs than processors": ("thin", 64, 1, 64, 4),
    "fewer tiles than processors": ("square", 320, 200, 64 * 5, 6),
    "a wave and a tile": ("wide", 520 * 2 + 48, 150, 64 * 5, 4),
    "two waves and most of one": ("thin", 320, 120, 64 * 3, 9),
    "whole waves": ("broad", 1024, 128, 128, 4),
    "shares of a whole tile": ("narrow", 128, 120, 128, 3),
}
"""Tile, out, tokens, in, processors."""


def whole_numbers(rows, cols, dtype, seed, largest):
    return torch.randint(-largest, largest + 1, (rows, cols), generator=torch.Generator().manual_seed(seed)).to(dtype)


@runs
@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("by_column", [False, True])
def test_stream_k_is_exact_in_whole_numbers(name, by_column):
    """Sums of whole numbers are exact in any order: bit-equal to the definition, also where nothing but one place fits."""
    tile, m, n, k, processors = STREAMS[name]
    m, n = -(-m // 64) * 64, n // 8 * 8 or 8 if by_column else n
    if by_column and tile not in BY_COLUMN:
        pytest.skip("the thin tile has no way for operands by column")
    for dtype, mode, out_dtype in ((BF16, "latest", torch.float32 if by_column else None), (F16, 1, None)):
        values, indices = reference.compress(whole_numbers(m, k, dtype, 1, 8), 2, 4)
        w, x = reference.decompress(values, indices, 2, 4, k), whole_numbers(n, k, dtype, 2, 4)
        exact = w.double() @ x.double().T
        y = calls.multiply(
            tile, values, reference.to_layout(indices, k, "wgmma.sp"), x.t().contiguous() if by_column else x, by_column, splits=0,
            mode=mode, processors=processors, out_dtype=out_dtype,
        )  # fmt: skip
        assert_equal_bits(y, (exact if by_column else exact.t().contiguous()).to(out_dtype or dtype))


@runs
def test_stream_k_leaves_full_waves_as_they_are():
    """Random operands: to the bit what the present kernel gives, in tiles of full waves; and two runs give the same bits."""
    tile, m, n, k, processors = "narrow", 128 * 5, 64, 64 * 5, 3
    values, meta, _ = operand(m, k, BF16)
    x = inputs(n, k, BF16)
    given = values, meta, x
    y, again = (calls.multiply(tile, *given, splits=0, mode=mode, processors=processors) for mode in ("earliest", 5))
    assert_equal_bits(y, again)
    assert_equal_bits(y[:, : 128 * 3], calls.multiply(tile, *given, processors=processors)[:, : 128 * 3])


@runs
def test_stream_k_epilogues(mode="latest"):
    for i, activation in enumerate(ACTIVATIONS):
        tile, processors = ("narrow", "thin", "square", "wide")[i], (5, 7, 6, 6)[i]
        given = {"splits": 0, "processors": processors, "mode": mode}
        check(tile, 320, 70, 64 * 5, bias=True, activation=activation, residual=True, **given)
        check(tile, 192, 21, 64 * 5, F16, activation=activation, residual=not activation, **given)
    for tile in BY_COLUMN:
        check(tile, 320, 136, 64 * 5, by_column=True, splits=0, processors=6, mode=mode)


@runs
@pytest.mark.parametrize("tile", ["wide", "thin"])
def test_inf_and_nan_reach_only_what_they_meet(tile):
    """Also where rows of a tile are not there: their values are zeros."""
    values, meta, w = operand(64, 128, BF16)
    x, met = inputs(18, 128, BF16), torch.zeros(18, 64, dtype=torch.bool)
    for token, bad, column in ((0, "inf", 0), (9, "nan", 77), (17, "-inf", 127)):
        x[token, column] = float(bad)
        met[token] = w[:, column] != 0
    assert_equal_bits(~calls.multiply(tile, values, meta, x).isfinite(), met)


# ---- the kernel on a GPU


@pytest.fixture
def on_gpu(monkeypatch):
    """``calls.multiply`` on a GPU; not run on one yet."""
    why = gemm.why_not_wgmma(torch.device("cuda"))
    if why:
        pytest.skip(why)

    def multiply(
        tile, values, meta, x, by_column=False, bias=None, activation="", residual=None, splits=1, mode="", processors=0, out_dtype=None
    ):
        monkeypatch.setattr(gemm, "plan", lambda *_: (list(TILES).index(tile), splits))
        operands = (None if t is None else t.cuda() for t in (values, meta, x, bias, residual))
        values, meta, x, bias, residual = operands
        m, n = values.shape[0], x.shape[1 if by_column else 0]
        y = fill_poison(x.new_empty((m, n) if by_column else (n, m), dtype=out_dtype or x.dtype))
        return gemm.multiply(values, meta, x, y, n, 2 * values.shape[1], by_column, bias, activation, residual).cpu()

    return multiply


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("tile", TILES)
def test_every_tile_on_a_gpu(on_gpu, tile, dtype):
    values, meta, w = operand(320, 192, dtype)
    assert_equal_bits(on_gpu(tile, values, meta, torch.eye(192, dtype=dtype)), w.t().contiguous())
    cols, stages = TILES[tile][1:3]
    for m, n, k in ((64, 1, 64), (320, cols + 9, 64 * (stages + 1)), (1024, 1000, 2048), (64, 9 * cols + 8, 64)):
        check(tile, m, n, k, dtype, bias=m == 320, activation="silu", residual=n == 1, by=on_gpu)
        check(tile, m, n, k, dtype, splits=2 if k > 64 else 1, by=on_gpu)
    if tile in BY_COLUMN:
        assert_equal_bits(on_gpu(tile, values, meta, torch.eye(192, dtype=dtype), True), w)
        for m, n, k in ((64, 8, 64), (320, cols + 72, 64 * (stages + 1)), (1024, 1008, 2048)):
            check(tile, m, n, k, dtype, by_column=True, by=on_gpu)
            check(tile, m, n, k, dtype, by_column=True, by=on_gpu, splits=2 if k > 64 else 1, out_dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize(("tile", "by_column"), [*((t, False) for t in TILES), *((t, True) for t in BY_COLUMN)])
def test_blocks_of_several_tiles_on_a_gpu(on_gpu, tile, by_column):
    clusters = torch.cuda.get_device_properties("cuda").multi_processor_count // TILES[tile][3]
    sizes = calls.several(TILES[tile], clusters=clusters)
    for splits in (1, 2):
        check(tile, *sizes, by_column=by_column, bias=not by_column, splits=splits, by=on_gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(64, 8, 192), (4096, 1000, 1024), (14336, 1024, 512)])
def test_stream_k_on_a_gpu(m, n, k, by_column):
    """In whole numbers, bit-equal to the definition, and in every run; not run on one yet."""
    if why := gemm.why_not_wgmma(torch.device("cuda")):
        pytest.skip(why)
    values, indices = reference.compress(whole_numbers(m, k, BF16, 1, 8), 2, 4)
    w, x = reference.decompress(values, indices, 2, 4, k).cuda(), whole_numbers(n, k, BF16, 2, 4).cuda()
    exact = w.double() @ x.double().T
    values, meta = values.cuda(), reference.to_layout(indices, k, "wgmma.sp").cuda()
    dense, wanted = (x.t().contiguous(), exact) if by_column else (x, exact.t().contiguous())
    for _ in range(3):
        y = fill_poison(torch.empty(wanted.shape, dtype=BF16, device="cuda"))
        assert_equal_bits(gemm.multiply(values, meta, dense, y, n, k, by_column, by=gemm.STREAM_K), wanted.to(BF16))


@pytest.mark.gpu
def test_a_captured_call_reads_what_is_there_when_it_is_replayed(on_gpu):
    values, meta, w = (t.cuda() for t in operand(256, 192, BF16))
    x = inputs(40, 192, BF16, "cuda")
    torch.ops.nmkernels.nm_linear(x, values, meta, 2, 4, 192)  # what is loaded at a first call is loaded before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch.ops.nmkernels.nm_linear(x, values, meta, 2, 4, 192)
    for seed in (5, 6):
        x.copy_(inputs(40, 192, BF16, "cuda", seed))
        graph.replay()
        as_good_as_dense(y, w, x)
