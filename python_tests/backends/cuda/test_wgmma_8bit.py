"""D = A B by 8-bit wgmma.sp: what the host decides and tells, and the kernel's results, from its PTX, in ``python_tests.ptx``."""

from __future__ import annotations

import re
from unittest.mock import Mock

import pytest
import torch

from nmkernels import ops, reference
from nmkernels.backends import shared
from nmkernels.backends.cuda import linear as gemm
from nmkernels.backends.cuda import quantize as eight
from nmkernels.backends.cuda.core import DTYPES
from nmkernels.reference.layouts import EIGHT_BIT
from nmkernels.testing import assert_equal_bits, assert_no_worse, poison
from python_tests.ptx.order import Hazard

from . import wgmma_calls as calls
from .test_wgmma import H100, H200, host, runs

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
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


def name_of(value):
    return "-".join(calls.EIGHT_KINDS[t] for t in value[:2]) + "-straight" * value[2] if isinstance(value, tuple) else str(value)


every_kernel = pytest.mark.parametrize(("kind", "promotes", "tile"), [((a, b, by), p, tile) for a, b, by, p, tile in KERNELS], ids=name_of)


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


@pytest.fixture
def hopper(monkeypatch):
    """The calls that reach the core of an H100 that is not there."""
    module = Mock()
    module.wgmma_obstacle.return_value, module.gemm_wgmma_8bit_has.return_value = "", True
    module.gemm_wgmma_8bit_plan.return_value = 1, 1
    monkeypatch.setattr(gemm, "EMULATED", H100)
    monkeypatch.setattr(eight, "core", lambda _: module)
    return module


@pytest.mark.parametrize(
    ("obstacle", "there", "transposed", "word"),
    [
        ("", True, False, "by 8-bit wgmma.sp"),
        ("this GPU has 8.0", True, False, "this GPU has 8.0"),
        ("", False, False, "no kernel of torch.float8_e4m3fn by"),
        ("", True, True, "8 columns"),
    ],
)
def test_when_it_is_chosen_and_why(hopper, obstacle, there, transposed, word):
    hopper.wgmma_obstacle.return_value, hopper.gemm_wgmma_8bit_has.return_value = obstacle, there
    x, w = ops.quantize(torch.randn(20, 128), E4M3, rows=True), ops.quantize_pack(torch.randn(64, 128), E4M3)
    can, reason = eight.takes(*x, *w, None, BF16, transposed, False)
    assert word in reason and can == (word == "by 8-bit wgmma.sp")
    eight.linear_quantized(*x, *w, None, BF16, transposed, False)
    assert hopper.gemm_wgmma_sp_8bit.call_args.args[8:-2] == (1, 4, 4, False, True, True, 64, 20, 128, transposed, 1, 1)


@pytest.mark.parametrize(
    ("dtype", "fast", "promotes"), [(E4M3, False, True), (E5M2, True, False), (INT8, False, False), (INT8, True, False)]
)
def test_sums_are_promoted_unless_fast_or_exact(hopper, dtype, fast, promotes):
    """The plan is that of the same kernel: its tiles are others."""
    x, w = ops.quantize(torch.randn(20, 128), dtype), ops.quantize_pack(torch.randn(64, 128), dtype)
    eight.linear_quantized(*x, *w, None, BF16, False, fast)
    assert hopper.gemm_wgmma_sp_8bit.call_args.args[13] is promotes and hopper.gemm_wgmma_8bit_plan.call_args.args[3] is promotes


@pytest.mark.parametrize(
    ("dtype", "transposed", "rounded"), [(BF16, False, True), (BF16, True, False), (F32, False, False), (F16, False, False)]
)
def test_bias_is_the_kernels_where_it_rounds(hopper, dtype, transposed, rounded):
    """Elsewhere its sums are fp32, which torch finishes."""
    x, w = ops.quantize(torch.randn(24, 128), E4M3), ops.quantize_pack(torch.randn(64, 128), E4M3)
    bias = torch.randn(64, dtype=dtype)
    y = eight.linear_quantized(*x, *w, bias, dtype, transposed, False)
    args = hopper.gemm_wgmma_sp_8bit.call_args.args
    assert bool(args[5]) == rounded and args[8] == DTYPES[BF16 if rounded else F32]
    assert y.dtype == dtype and y.shape == ((64, 24) if transposed else (24, 64))


def test_a_call_depends_on_nothing_that_a_capture_would_freeze(hopper):
    """Each call hands over the addresses of its own tensors; the plan is made once, from sizes alone."""
    w = ops.quantize_pack(torch.randn(64, 256), E4M3)
    for _ in range(2):
        x = ops.quantize(torch.randn(20, 256), E4M3)
        eight.linear_quantized(*x, *w, None, BF16, False, False)
        values, meta, dense, step, x_step, bias, _, parts = hopper.gemm_wgmma_sp_8bit.call_args.args[:8]
        assert (values, meta, step) == tuple(t.data_ptr() for t in w) and (dense, x_step) == tuple(t.data_ptr() for t in x)
        assert not bias and not parts
    assert hopper.gemm_wgmma_8bit_plan.call_count == 1
    # nothing else of the core's is called: it neither allocates nor waits
    assert {name for name, *_ in hopper.mock_calls} <= {"gemm_wgmma_sp_8bit", "gemm_wgmma_8bit_plan", "gpu", "wgmma_obstacle"}


# ---- the kernel


def operands(m, k, a, seed=1):
    """A packed weight and its dense form, with a step of 2^i for each row."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(m, k, generator=g) if a != INT8 else torch.randint(-127, 128, (m, k), generator=g).float()
    values, meta = reference.quantize_pack(w, torch.tensor(1.0), a)
    step = torch.exp2(torch.randint(-3, 4, (m,), generator=g).float())
    dense = reference.decompress(values.double(), reference.from_layout(meta, EIGHT_BIT), 2, 4, k) * step[:, None]
    return values, meta, step, dense


def check(
    kind, promotes, tile, m, n, k, mode="earliest", bias=False, dtype=BF16, splits=1, processors=4, by=calls.multiply_eight,
):  # fmt: skip
    a, b, by_column = kind
    g = torch.Generator().manual_seed(n)
    values, meta, step, dense = operands(m, k, a)
    x = reference.quantize(torch.randn(n, k, generator=g), torch.tensor(40.0 if b == INT8 else 1.0), b)
    x_step, biases = torch.rand(n, generator=g), torch.randn(m, generator=g).to(dtype) if bias else None
    if splits > 1 or n % 2:
        x_step = x_step[:1]
    y = by(tile, values, meta, step, x, x_step, promotes, by_column, biases, dtype, splits, mode, processors)
    args = x, x_step, values, meta, step, biases, dtype, by_column, False
    exact = (x.double() * x_step.double().reshape(-1, 1)) @ dense.T
    exact = exact if biases is None else exact + biases.double()
    exact, what = exact.T if by_column else exact, f"{kind} {tile} {m} {n} {k} {mode}"
    if dtype == F32 and a != INT8 and by is not calls.multiply_eight:
        # of the 24 bits of fp32 a GPU's tensor cores keep about 14 in float8 sums, by the largest product
        largest = (x.double().abs() * x_step.double().reshape(-1, 1)) @ dense.abs().T
        assert ((y - exact).abs() <= 2.0**-8 * (largest.T if by_column else largest)).all(), what
    else:
        assert_no_worse(y, reference.linear_quantized(*args), exact, what)


def check_identity(kind, promotes, tile, by=calls.multiply_eight):
    """Check that one-hot rows return the exact weight: descriptors, swizzles, metadata, and the places of results and scales."""
    a, b, by_column = kind
    values, meta, step, dense = operands(320, 256, a)
    x, x_step = torch.eye(256).to(b), torch.exp2(torch.arange(256) % 5 - 2.0)
    y = by(tile, values, meta, step, x, x_step, promotes, by_column)
    want = (dense * x_step.double()).to(BF16)
    assert_equal_bits(y, want if by_column else want.t().contiguous())


def check_ragged(kind, promotes, tile, **how):
    """Check partial tiles and clusters, few tokens, wrap-around of stages, an odd number of slabs, and split k."""
    _, cols, stages, _ = calls.EIGHT_TILES[promotes][tile]
    for m, n, k in ((64, 8, 128), (320, cols + 8, 128 * (stages + 1)), (192, 24, 128 * (2 * stages + 1))):
        check(kind, promotes, tile, m, n, k, **how)
    check(kind, promotes, tile, 192, cols + 16, 128 * 9, splits=3, **how)
    if not kind[2]:
        check(kind, promotes, tile, 64, 2 * cols + 7, 128, bias=True, **how)
        check(kind, promotes, tile, 64, 1, 128 * 2, dtype=F32, **how)


@runs
@every_kernel
def test_every_value_is_found(kind, promotes, tile):
    check_identity(kind, promotes, tile)


@runs
@every_kernel
def test_random_operands_of_ragged_sizes(kind, promotes, tile):
    check_ragged(kind, promotes, tile, mode=1)


@runs
@every_kernel
def test_a_block_has_several_tiles(kind, promotes, tile):
    """One cluster has all: results of a tile leave while the next is multiplied, from the stage on where the last one ended."""
    shape = calls.EIGHT_TILES[promotes][tile]
    check(kind, promotes, tile, *calls.several(shape, 128), mode="latest", processors=shape[3])


@runs
@pytest.mark.parametrize("processors", [1, 132])
def test_any_number_of_blocks(processors):
    check(KINDS[0], True, "tall", 320, 400, 256, processors=processors, mode="latest")


@runs
@pytest.mark.parametrize("promotes", [False, True])
def test_other_results(promotes, mode="latest"):
    """fp32, and parts of k, straight and transposed."""
    for kind in (KINDS[0], KINDS[5]):
        check(kind, promotes, "square", 192, 72, 128, dtype=F32, mode=mode)
        check(kind, promotes, "square", 192, 72, 128 * 9, splits=3, mode=mode, dtype=F32)


@runs
@pytest.mark.parametrize("promotes", [False, True])
def test_inf_and_nan_reach_only_what_they_meet(promotes):
    """Also where rows of a tile are not there: their values are zeros."""
    values, meta, step, dense = operands(64, 128, E5M2)
    x, met = torch.randn(18, 128, generator=torch.Generator().manual_seed(2)), torch.zeros(18, 64, dtype=torch.bool)
    for token, bad, column in ((0, "inf", 0), (9, "nan", 77), (17, "-inf", 127)):
        x[token, column] = float(bad)
        met[token] = dense[:, column] != 0
    for tile in calls.EIGHT_TILES[promotes]:
        y = calls.multiply_eight(tile, values, meta, step, x.to(E5M2), torch.ones(1), promotes)
        assert_equal_bits(~y.isfinite(), met)


@runs
@pytest.mark.parametrize("fast", [False, True])
def test_the_op_multiplies_by_it(hopper, monkeypatch, fast):
    """By the host's own plan: parts of k, biases, results of every dtype, straight and transposed."""
    memory = {}

    def address(x):
        at = shared.address(x)
        memory[at] = x
        return at

    def multiply(*args):
        calls.launch_eight([memory[at] for at in args[:8]], args[8:14], *args[14:20], mode="latest")

    monkeypatch.setattr(eight, "address", address)
    hopper.gemm_wgmma_8bit_plan, hopper.gemm_wgmma_sp_8bit = calls.host().gemm_wgmma_8bit_plan, multiply
    g = torch.Generator().manual_seed(1)
    w, x = torch.randn(192, 2048, generator=g), torch.randn(40, 2048, generator=g)
    for (a, b, transposed), dtype, biased in (
        (KINDS[0], BF16, True), (KINDS[0], F32, True), (KINDS[1], F16, False), (KINDS[3], BF16, True), (KINDS[5], BF16, True),
        (KINDS[5], F32, False),
    ):  # fmt: skip
        bias = torch.randn(192, generator=g).to(dtype) if biased else None
        args = (*ops.quantize(x, b, rows=True), *ops.quantize_pack(w, a, rows=True), bias)
        y = eight.linear_quantized(*args, dtype, transposed, fast)
        exact = reference.linear_quantized(*args[:-1], None, F32, transposed, False).double()
        exact = exact if bias is None else exact + (bias[:, None] if transposed else bias).double()
        assert_no_worse(y, reference.linear_quantized(*args, dtype, transposed, fast), exact, f"{a} {b} {dtype}")
    assert eight.plan(hopper, "gemm_wgmma_8bit", -1, 192, 40, 2048, True)[1] > 1, "k is cut into parts"


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
    "no wait_group.read": (r"cp\.async\.bulk\.wait_group\.read 1;", "", "overwritten under a bulk store"),
    "no wait_group.read at the end": (r"cp\.async\.bulk\.wait_group\.read 0;", "", "left before wait_group"),
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
    values, meta, step, dense = operands(320, 896, E4M3)  # a block has two tiles
    x = reference.quantize(torch.randn(200, 896), torch.tensor(1.0), E4M3)
    try:
        y = calls.multiply_eight("tall", values, meta, step, x, torch.ones(1), True, mode=mode, code=made)
    except Hazard as hazard:
        assert re.match(expected, str(hazard)), str(hazard)
    else:
        right = torch.allclose(y.double(), x.double() @ dense.T, rtol=0.02, atol=0.5)
        assert not right and "wrong result" in expected


# ---- the kernel on a GPU


@pytest.fixture
def on_gpu(monkeypatch):
    """``calls.multiply_eight`` on a GPU."""
    why = gemm.why_not_wgmma(torch.device("cuda"))
    if why:
        pytest.skip(why)

    def multiply(
        tile, values, meta, step, x, x_step, promotes=False, by_column=False, bias=None, dtype=BF16, splits=1, mode="", processors=0,
    ):  # fmt: skip
        monkeypatch.setattr(eight, "plan", lambda *_: (list(calls.EIGHT_TILES[promotes]).index(tile), splits))
        given = (None if t is None else t.cuda() for t in (x, x_step, values, meta, step, bias))
        with poison():
            return eight.linear_quantized(*given, dtype, by_column, not promotes).cpu()

    return multiply


@pytest.mark.gpu
@every_kernel
def test_every_kernel_on_a_gpu(on_gpu, kind, promotes, tile):
    check_identity(kind, promotes, tile, on_gpu)
    check_ragged(kind, promotes, tile, by=on_gpu)
    check(kind, promotes, tile, 1024, 1000, 2048, by=on_gpu)


@pytest.mark.gpu
@every_kernel
def test_blocks_of_several_tiles_on_a_gpu(on_gpu, kind, promotes, tile):
    shape = calls.EIGHT_TILES[promotes][tile]
    clusters = torch.cuda.get_device_properties("cuda").multi_processor_count // shape[3]
    check(kind, promotes, tile, *calls.several(shape, 128, clusters), by=on_gpu)


def captured(call):
    """What replays ``call`` from a graph, and returns its result."""
    call()  # what is loaded at a first call is loaded before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()

    def replay():
        graph.replay()
        return y

    return replay


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["eager", "graph"])  # compute-sanitizer's step leaves "graph" out by name
@pytest.mark.parametrize("fast", [False, True])
def test_an_op_on_a_gpu_is_that_of_the_reference(fast, way):
    """By what the host plans itself, captured in a graph and not."""
    if why := gemm.why_not_wgmma(torch.device("cuda")):
        pytest.skip(why)
    w = ops.quantize_pack(torch.randn(320, 512), E4M3, rows=True)
    bias, weight = torch.randn(320, dtype=BF16, device="cuda"), ops.QuantizedPacked(*(t.cuda() for t in w))
    given = torch.randn(200, 512, device="cuda")

    def call():
        return ops.linear_quantized(ops.quantize(given, E4M3, rows=True), weight, bias, fast_accumulate=fast)

    result = captured(call) if way == "graph" else call
    for seed in (5, 6):
        given.copy_(torch.randn(200, 512, generator=torch.Generator().manual_seed(seed)))
        x = ops.Quantized(*(t.cpu() for t in ops.quantize(given, E4M3, rows=True)))
        args = *x, *w, None, F32, False, False
        exact = reference.linear_quantized(*args).double() + bias.double().cpu()
        assert_no_worse(result().cpu(), exact.to(BF16), exact)
