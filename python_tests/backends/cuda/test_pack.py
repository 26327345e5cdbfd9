"""pack in CUDA: every kernel (streams, tiles, any pattern), what is between them, both orientations, the layouts of tensor cores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nmkernels import Pattern, ShapeError, dispatch, reference, testing
from nmkernels.backends.cuda import pack
from python_tests.backends.packing import some_mask, some_mask_both_ways
from python_tests.conformance import moved
from python_tests.each import each

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
USUAL = [(F32, F32), (F32, BF16), (F32, F16), (BF16, BF16), (F16, F16)]
SMALL = ["2:4", "1:4", "1:8", "2:8", "1:16"]
ORIENTATIONS = {"rows": (True, False), "columns": (False, True), "both": (True, True)}
SCALE = torch.tensor(-1.37)
Check = Callable[..., None]


@pytest.fixture
def check(device: str, ours: Callable[[str], dispatch.Impl]) -> Check:
    def run(
        w: Tensor, pattern: str, select: str, way: str, dtype: torch.dtype | None = None, mask: Tensor | None = None,
        scale: Tensor | None = None, layout: str = "canonical",
    ) -> None:  # fmt: skip
        p = Pattern(pattern)
        args = w, p.n, p.m, select, mask, scale, dtype, *ORIENTATIONS[way], layout
        want = reference.pack(*(x.resolve_neg() if isinstance(x, Tensor) else x for x in args))
        there = moved(args, device)
        assert ours("nm_pack").supports(*there)[0]
        got = ours("nm_pack").fn(*there)
        what = f"{tuple(w.shape)} {w.dtype} {pattern} {select} {way} {dtype} {layout}"
        testing.assert_equal_bits(tuple(x.cpu() for x in got), want, what)

    return run


def edge(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers, ties, zeros of both signs, infinities, NaN, denormals, and what rounds to them, in one matrix."""
    info = torch.finfo(dtype)
    some = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        2.0,
        float("inf"),
        -float("inf"),
        float("nan"),
        info.tiny,
        -info.tiny / 4,
        info.max,
        -info.max,
        65519.0,
        1e-7,
    ]
    picked = torch.tensor(some, dtype=torch.float64)[torch.randint(len(some), (rows, cols))].to(dtype)
    return torch.where(torch.rand(rows, cols) < 0.4, picked, torch.randn(rows, cols).to(dtype))


@pytest.mark.quick(1, per=("way", "select"))
@each("select", ["magnitude", "given", "threshold", "transposable"])
@each("way", list(ORIENTATIONS))
def test_2_4(way: str, select: str, check: Check, poison: None) -> None:
    """One tile of a block and less, several, and ragged ones; sizes that the tile kernels leave to others."""
    for dtypes in USUAL:
        if way == "both" and select in ("magnitude", "threshold"):
            continue
        for rows, cols in ((32, 32), (128, 64), (160, 224), (4, 64), (64, 8), (20, 12), (36, 40), (256, 32)):
            w = edge(rows, cols, dtypes[0])
            mask = some_mask_both_ways(rows, cols, Pattern("2:4")) if select == "given" else None
            scale = SCALE if select == "threshold" and cols != 64 else None
            check(w, "2:4", select, way, dtypes[1], mask, scale)


@each("pattern", SMALL[1:])
@each("select", ["magnitude", "given"])
def test_other_small_patterns(select: str, pattern: str, check: Check, poison: None) -> None:
    for dtypes in USUAL:
        p = Pattern(pattern)
        for way in ("rows", "columns", "both"):
            if way == "both" and select == "magnitude":
                continue
            for rows, cols in ((16 * p.m, 64), (40 * p.m, 16 * 7), (3 * p.m, 32), (16 * p.m, 80)):
                w = edge(rows, cols, dtypes[0])
                mask = some_mask_both_ways(rows, cols, p) if select == "given" else None
                check(w, pattern, select, way, dtypes[1], mask)


@pytest.mark.quick(1, per="select")
@each("pattern", ["1:1", "3:4", "2:3", "5:16", "3:33", "100:256", "1:8"])
@each("select", ["magnitude", "given", "threshold"])
def test_any_pattern(select: str, pattern: str, check: Check, poison: None) -> None:
    for dtype in [F32, BF16, F16]:
        p = Pattern(pattern)
        for way in ORIENTATIONS if select == "given" else ("rows", "columns"):
            for rows, cols in ((p.m, p.m), (40 // p.m * p.m + p.m, 70 // p.m * p.m + 2 * p.m)):
                mask = some_mask_both_ways(rows, cols, p) if select == "given" else None
                check(edge(rows, cols, dtype), pattern, select, way, BF16, mask, SCALE if select == "threshold" else None)


@each("select", ["magnitude", "given", "threshold", "transposable"])
def test_unusual_pairs_of_dtypes(select: str, check: Check) -> None:
    for way in list(ORIENTATIONS):
        for dtypes in [(BF16, F16), (F16, BF16), (BF16, F32), (F16, F32)]:
            if way == "both" and select in ("magnitude", "threshold"):
                continue
            for layout in ("canonical", "mma.sp") if dtypes[1] != F32 else ("canonical",):
                w = edge(64, 128, dtypes[0])
                mask = some_mask_both_ways(64, 128, Pattern("2:4")) if select == "given" else None
                check(w, "2:4", select, way, dtypes[1], mask, SCALE if select == "threshold" else None, layout)


@each("select", ["magnitude", "given", "threshold", "transposable"])
@each("layout", ["mma.sp", "wgmma.sp"])
def test_layouts_of_tensor_cores(layout: str, select: str, check: Check, poison: None) -> None:
    for dtypes in [d for d in USUAL if d[1] != F32]:
        small = 16 if layout == "mma.sp" else 64
        for way, shapes in (
            ("rows", [(small, 64), (3 * small, 192)]),
            ("columns", [(64, small), (192, 3 * small)]),
            ("both", [(64, 64), (192, 320)]),
        ):
            if way == "both" and select in ("magnitude", "threshold"):
                continue
            for rows, cols in shapes:
                w = edge(rows, cols, dtypes[0])
                mask = some_mask_both_ways(rows, cols, Pattern("2:4")) if select == "given" else None
                check(w, "2:4", select, way, dtypes[1], mask, SCALE if select == "threshold" else None, layout)


@each("select", ["magnitude", "given", "transposable"])
def test_strides_and_offsets(select: str, check: Check) -> None:
    for way in list(ORIENTATIONS):
        if way == "both" and select == "magnitude":
            continue
        for dtype in (F32, BF16):
            mask = some_mask_both_ways(64, 96, Pattern("2:4")) if select == "given" else None
            w = torch.randn(64, 96).to(dtype)
            check(w.t().contiguous().t(), "2:4", select, way, BF16, mask)
            check(torch.cat([w, w])[::2], "2:4", select, way, BF16, mask)
            check(torch.cat([w.new_zeros(1), w.flatten()])[1:].view(64, 96), "2:4", select, way, BF16, mask)
            check(torch._neg_view(w), "2:4", select, way, BF16, mask)
            if mask is not None:
                shifted = torch.cat([mask.new_zeros(3), mask.flatten()])[3:].view(64, 96)
                check(w, "2:4", select, way, BF16, shifted)
                check(w, "2:4", select, way, BF16, mask.t().contiguous().t())


def test_several_blocks(check: Check) -> None:
    for pattern in SMALL:
        check(edge(640, 320, BF16), pattern, "magnitude", "columns")
        check(edge(640, 320, F32), pattern, "magnitude", "rows", BF16)
    check(edge(640, 320, F32), "2:4", "transposable", "both", BF16)


def test_nothing_to_do(check: Check) -> None:
    for way in list(ORIENTATIONS):
        for shape in [(0, 8), (8, 0), (0, 0)]:
            check(torch.randn(shape), "2:4", "transposable", way, BF16)


@each("way", list(ORIENTATIONS))
def test_a_mask_that_keeps_too_many_is_refused(way: str, device: str, ours: Callable[[str], dispatch.Impl]) -> None:
    """In an orientation that is wanted, and only there."""
    for pattern in [*SMALL, "3:5"]:
        p = Pattern(pattern)
        rows, cols = 40 // p.m * p.m + p.m, 96 // p.m * p.m + p.m

        def run(mask: Tensor, p: Pattern = p, rows: int = rows, cols: int = cols) -> None:
            w = torch.randn(rows, cols)
            ours("nm_pack").fn(w.to(device), p.n, p.m, "given", mask.to(device), None, BF16, *ORIENTATIONS[way], "canonical")

        mask = torch.zeros(rows, cols, dtype=torch.bool)
        run(mask)
        for along_rows in (True, False):
            full = mask.clone()
            if along_rows:
                full[rows - 1, cols - p.n - 1 :] = True
            else:
                full[rows - p.n - 1 :, cols - 1] = True
            if ORIENTATIONS[way][0 if along_rows else 1]:
                with pytest.raises(ShapeError, match=f"keeps more than {p.n} elements in a group, but {pattern} stores {p.n}"):
                    run(full)
            else:
                run(full)


@each("pattern", ["2:4", "1:8"])
def test_a_held_mask_is_packed_as_a_given_one_and_not_checked(
    pattern: str, device: str, ours: Callable[[str], dispatch.Impl], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host would wait for the answer once per layer and step."""
    for transposed in [False, True]:
        p, w = Pattern(pattern), torch.randn(64, 64, device=device)
        mask = some_mask_both_ways(64, 64, p).to(device)
        w, mask = (w.t(), mask.t()) if transposed else (w, mask)
        rest = None, BF16, True, True, "canonical"
        want = ours("nm_pack").fn(w, p.n, p.m, "given", mask, *rest)
        with monkeypatch.context() as patch:
            patch.setattr(pack, "check_flag", lambda *_: pytest.fail("it waits"))
            testing.assert_equal_bits(ours("nm_pack").fn(w, p.n, p.m, "held", mask, *rest), want)
            ours("nm_pack").fn(w, p.n, p.m, "held", torch.ones_like(mask), *rest)  # anything, and nothing outside of the buffers


def test_two_runs_are_equal(device: str, ours: Callable[[str], dispatch.Impl]) -> None:
    w = torch.randn(128, 256, device=device)
    first, second = (ours("nm_pack").fn(w, 2, 4, "transposable", None, None, BF16, True, True, "mma.sp") for _ in range(2))
    testing.assert_equal_bits(first, second)


def test_what_it_declines(device: str, ours: Callable[[str], dispatch.Impl]) -> None:
    w = torch.randn(8, 8, device=device)
    can, reason = ours("nm_pack").supports(w, 1, 4, "transposable", None, None, None, True, True, "canonical")
    assert not can and "matching problem" in reason
    can, reason = ours("nm_pack").supports(w, 2, 4, "magnitude", None, None, torch.float64, True, False, "canonical")
    assert not can and "float64" in reason


def test_rows_alone_may_be_short_of_the_pattern_along_columns(check: Check) -> None:
    check(torch.randn(70, 32), "2:4", "given", "rows", BF16, some_mask(70, 32, Pattern("2:4")))
    check(torch.randn(32, 70), "2:4", "given", "columns", BF16, some_mask(70, 32, Pattern("2:4")).t())
