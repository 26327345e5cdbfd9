"""pack in CUDA: every kernel (streams, tiles, any pattern), what is between them, both orientations, the layouts of tensor cores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nmkernels import Pattern, ShapeError, dispatch, reference, testing
from nmkernels.backends.cuda import compress
from python_tests.backends.kernel_suites import some_mask, some_mask_both_ways
from python_tests.conformance import moved
from python_tests.for_each import for_each

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
USUAL = [(F32, F32), (F32, BF16), (F32, F16), (BF16, BF16), (F16, F16)]
SMALL = ["2:4", "1:4", "1:8", "2:8", "1:16"]
ORIENTATIONS = {"rows": (True, False), "columns": (False, True), "both": (True, True)}
FORMS = {**{way: (*one, False) for way, one in ORIENTATIONS.items()}, "rows and dense": (True, False, True), "dense": (False, False, True)}
FORMS["all"] = (True, True, True)
"""Rows, columns, dense."""
UNUSUAL = [(BF16, F16), (F16, BF16), (BF16, F32), (F16, F32)]
SELECTS = ["magnitude", "transposable", "given", "threshold"]
SCALE = torch.tensor(-1.37)
INF, NAN = float("inf"), float("nan")
Check = Callable[..., None]


@pytest.fixture
def check(device: str, ours: Callable[[str], dispatch.Impl]) -> Check:
    def run(
        w: Tensor, pattern: str, select: str, way: str, dtype: torch.dtype | None = None, mask: Tensor | None = None,
        scale: Tensor | None = None, layout: str = "canonical",
    ) -> None:  # fmt: skip
        p = Pattern(pattern)
        rows, columns, dense = FORMS[way]
        args = w, p.n, p.m, select, mask, scale, dtype, rows, columns, layout, dense
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
    some = [0.0, -0.0, 1.0, -1.0, 2.0, INF, -INF, NAN, info.tiny, -info.tiny / 4, info.max, -info.max, 65519.0, 1e-7]
    picked = torch.tensor(some, dtype=torch.float64)[torch.randint(len(some), (rows, cols))].to(dtype)
    return torch.where(torch.rand(rows, cols) < 0.4, picked, torch.randn(rows, cols).to(dtype))


def check_all(
    check: Check, pattern: str, select: str, way: str, shapes: list[tuple[int, int]], dtypes: list[tuple[torch.dtype, torch.dtype]],
    layout: str = "canonical",
) -> None:  # fmt: skip
    """Edge numbers of these shapes and dtypes, with a mask and a scale where the way to select takes them."""
    if way in ("both", "all") and select in ("magnitude", "threshold"):
        return
    for source, to in dtypes:
        for rows, cols in shapes:
            mask = some_mask_both_ways(rows, cols, Pattern(pattern)) if select == "given" else None
            scale = SCALE if select == "threshold" and cols != 64 else None
            check(edge(rows, cols, source), pattern, select, way, to, mask, scale, layout)


@pytest.mark.quick(2)
@pytest.mark.parametrize("select", SELECTS)
@for_each("way", list(FORMS))
def test_2_4(way: str, select: str, check: Check, poison: None) -> None:
    """One tile of a block and less, several, and ragged ones; sizes that the tile kernels leave to others; unusual pairs of dtypes."""
    shapes = [(32, 32), (128, 64), (160, 224), (4, 64), (64, 8), (20, 12), (36, 40), (256, 32)]
    check_all(check, "2:4", select, way, shapes, USUAL)
    check_all(check, "2:4", select, way, [(64, 128)], UNUSUAL)
    check_all(check, "2:4", select, way, [(64, 128)], UNUSUAL[:2], "mma.sp")


@pytest.mark.slow
@for_each("pattern", [*SMALL[1:], "1:1", "3:4", "2:3", "5:16", "3:33", "100:256"])
@for_each("select", ["magnitude", "given", "threshold"])
def test_other_patterns(select: str, pattern: str, check: Check, poison: None) -> None:
    m = Pattern(pattern).m
    for way in FORMS:
        if pattern in SMALL and select != "threshold":
            check_all(check, pattern, select, way, [(16 * m, 64), (40 * m, 16 * 7), (3 * m, 32), (16 * m, 80)], USUAL)
        else:
            shapes = [(m, m), (40 // m * m + m, 70 // m * m + 2 * m)]
            check_all(check, pattern, select, way, shapes, [(dtype, BF16) for dtype in (F32, BF16, F16)])


@for_each("select", SELECTS)
@for_each("layout, small", [("mma.sp", 16), ("wgmma.sp", 64)])
def test_layouts_of_tensor_cores(layout: str, small: int, select: str, check: Check, poison: None) -> None:
    along, both = [(small, 64), (3 * small, 192)], [(64, 64), (192, 320)]
    shapes = {"rows": along, "columns": [(64, small), (192, 3 * small)], "both": both, "rows and dense": along, "dense": along, "all": both}
    for way in FORMS:
        check_all(check, "2:4", select, way, shapes[way], [d for d in USUAL if d[1] != F32], layout)


@for_each("select", ["magnitude", "given", "transposable"])
def test_strides_and_offsets(select: str, check: Check) -> None:
    for way in FORMS:
        if way in ("both", "all") and select == "magnitude":
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


def test_one_launch_makes_the_rows_and_the_dense_form(
    ours: Callable[[str], dispatch.Impl], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a training step reads on a GPU, from one reading of the weight."""
    calls: list[bool] = []
    core = compress.core(torch.empty(0, device=device))

    class Watched:
        def __getattr__(self, name: str) -> Callable[..., object]:
            call = getattr(core, name)
            return lambda *args: [calls.append(name == "pack"), call(*args)][1]

    monkeypatch.setattr(compress, "core", lambda _: Watched())
    for select, scale in [("magnitude", None), ("threshold", SCALE.to(device)), ("held", None)]:
        for layout in ("canonical", "mma.sp", "wgmma.sp"):
            for source, to in USUAL[1:]:
                for rows in (True, False):
                    w = torch.randn(64, 128, device=device).to(source)
                    mask = some_mask(64, 128, Pattern("2:4")).to(device) if select == "held" else None
                    calls.clear()
                    ours("nm_pack").fn(w, 2, 4, select, mask, scale, to, rows, False, layout, True)
                    assert calls == [True], (select, layout, source, to, rows)


def test_several_blocks(check: Check) -> None:
    for pattern in SMALL:
        check(edge(640, 320, BF16), pattern, "magnitude", "columns")
        check(edge(640, 320, F32), pattern, "magnitude", "rows", BF16)
    check(edge(640, 320, F32), "2:4", "transposable", "both", BF16)


@for_each("way", list(ORIENTATIONS))
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


@for_each("pattern", ["2:4", "1:8"])
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
            patch.setattr(compress, "check_flag", lambda *_: pytest.fail("it waits"))
            testing.assert_equal_bits(ours("nm_pack").fn(w, p.n, p.m, "held", mask, *rest), want)
            ours("nm_pack").fn(w, p.n, p.m, "held", torch.ones_like(mask), *rest)  # anything, and nothing outside of the buffers


def test_what_it_declines(device: str, ours: Callable[[str], dispatch.Impl]) -> None:
    w = torch.randn(8, 8, device=device)
    can, reason = ours("nm_pack").supports(w, 1, 4, "transposable", None, None, None, True, True, "canonical")
    assert not can and "matching problem" in reason
    can, reason = ours("nm_pack").supports(w, 2, 4, "magnitude", None, None, torch.float64, True, False, "canonical")
    assert not can and "float64" in reason


def test_rows_alone_may_be_short_of_the_pattern_along_columns(check: Check) -> None:
    check(torch.randn(70, 32), "2:4", "given", "rows", BF16, some_mask(70, 32, Pattern("2:4")))
    check(torch.randn(32, 70), "2:4", "given", "columns", BF16, some_mask(70, 32, Pattern("2:4")).t())
