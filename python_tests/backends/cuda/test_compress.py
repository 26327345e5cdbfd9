"""compress and decompress in CUDA: every width of index, threads that have no whole chunk, given masks, damaged indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nmkernels import Pattern, ShapeError, dispatch, reference, testing
from nmkernels.reference import pack_indices
from python_tests.backends.cuda.packing import some_mask

SMALL = ["2:4", "1:4", "1:8", "2:8", "1:16"]
ANY = ["3:4", "4:4", "1:1", "2:3", "4:8", "3:5", "5:16", "12:16", "1:32", "3:33", "8:256", "128:256"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Ours = Callable[[str], dispatch.Impl]


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...], what: str = "") -> None:
    testing.assert_equal_bits(tuple(x.cpu() for x in got), want, what)


def to(device: str, *xs: Tensor | None) -> list[Any]:
    return [None if x is None else x.to(device) for x in xs]


@pytest.mark.parametrize("pattern", SMALL + ANY)
def test_equals_the_reference(pattern: str, device: str, ours: Ours, poison: None) -> None:
    for dtype in DTYPES:
        for given in [False, True]:
            p = Pattern(pattern)
            # rows that end inside a byte, that end with one, and a long one that ends inside a chunk and needs several blocks
            for rows, cols in ((9, 5 * p.m), (5, 8 * p.m), (1, 33000 // p.m * p.m if p.m < 20 else 5000 // p.m * p.m)):
                w = torch.randn(rows, cols).to(dtype)
                w[0, : p.m] = w[0, 0]  # ties
                mask = some_mask(rows, cols, p) if given else None
                want = reference.compress(w, p.n, p.m, mask)
                dense = reference.decompress(*want, p.n, p.m, cols)
                x, m, values, indices = to(device, w, mask, *want)
                assert_same(ours("nm_compress").fn(x, p.n, p.m, m), want, f"{rows}, {cols}")
                assert_same((ours("nm_decompress").fn(values, indices, p.n, p.m, cols),), (dense,), f"{rows}, {cols}")


@pytest.mark.parametrize("pattern", [*SMALL, "3:5", "4:32"])
def test_nasty_numbers(pattern: str, device: str, ours: Ours) -> None:
    for dtype in DTYPES:
        p = Pattern(pattern)
        for case in testing.cases(p, dtype):
            want = reference.compress(case.x, p.n, p.m)
            assert_same(ours("nm_compress").fn(case.x.to(device), p.n, p.m), want, case.id)


@pytest.mark.parametrize("pattern", [*SMALL, "3:5"])
def test_nans_tie_whatever_their_bits(pattern: str, device: str, ours: Ours) -> None:
    for dtype in DTYPES:
        p, ints = Pattern(pattern), torch.int32 if dtype == torch.float32 else torch.int16
        infinity = int(torch.tensor(float("inf"), dtype=dtype).view(ints))
        payloads = torch.randint(1, torch.iinfo(ints).max - infinity, (9, 16 * p.m)).to(ints)
        nans = torch.where(torch.rand(payloads.shape) < 0.5, infinity + payloads, -1 - payloads).to(ints).view(dtype)
        assert nans.isnan().all()
        w = torch.where(torch.rand(payloads.shape) < 0.6, nans, torch.randn(payloads.shape).to(dtype))
        assert_same(ours("nm_compress").fn(w.to(device), p.n, p.m), reference.compress(w, p.n, p.m))


@pytest.mark.parametrize("pattern", ["2:4", "1:8", "2:8", "1:16", "3:5", "4:32"])
def test_a_last_group_that_the_end_of_the_row_cuts(pattern: str, device: str, ours: Ours, poison: None) -> None:
    p = Pattern(pattern)
    for wide in (p.m, 8 * p.m, 5000 // p.m * p.m):
        for missing in {1, p.m - 1}:
            values, indices = reference.compress(torch.randn(3, wide), p.n, p.m)
            want = reference.decompress(values, indices, p.n, p.m, wide - missing)
            values, indices = to(device, values, indices)
            assert_same((ours("nm_decompress").fn(values, indices, p.n, p.m, wide - missing),), (want,))


@pytest.mark.parametrize("pattern", ["2:4", "2:8", "3:5"])
def test_memory_that_is_not_aligned(pattern: str, device: str, ours: Ours) -> None:
    for given in [False, True]:
        p, rows = Pattern(pattern), 4
        w = torch.randn(rows, 40 * p.m).bfloat16()
        mask = some_mask(rows, 40 * p.m, p) if given else None
        want = reference.compress(w, p.n, p.m, mask)

        def moved(x: Tensor, by: int) -> Tensor:
            memory = torch.full((x.numel() + 2 * by,), 77, device=device).to(x.dtype)
            return memory[by : by + x.numel()].copy_(x.flatten()).view(x.shape)

        places = moved(want[0].zero_().clone(), 1), moved(torch.zeros_like(want[1]), 3)
        want = reference.compress(w, p.n, p.m, mask)
        got = ours("nm_compress").fn(moved(w, 1), p.n, p.m, None if mask is None else moved(mask, 3), places)
        assert_same(got, want)
        dense = moved(torch.zeros_like(w), 3)
        ours("nm_decompress").fn(*places, p.n, p.m, w.shape[1], dense)
        assert_same((dense,), (reference.decompress(*want, p.n, p.m, w.shape[1]),))


def test_out_is_what_is_written(device: str, ours: Ours) -> None:
    w = torch.randn(5, 24)
    want = reference.compress(w, 2, 4)
    out = tuple(testing.fill_poison(torch.empty_like(x, device=device)) for x in want)
    got = ours("nm_compress").fn(w.to(device), 2, 4, None, out)
    assert all(a is b for a, b in zip(got, out, strict=True))
    assert_same(got, want)
    dense = testing.fill_poison(torch.empty_like(w, device=device))
    assert ours("nm_decompress").fn(*out, 2, 4, 24, dense) is dense
    assert_same((dense,), (reference.prune(w, 2, 4),))


def test_nothing_to_do(device: str, ours: Ours) -> None:
    for shape in [(0, 8), (3, 0), (0,)]:
        values, indices = ours("nm_compress").fn(torch.randn(shape, device=device), 2, 4)
        assert values.numel() == indices.numel() == 0
        assert ours("nm_decompress").fn(values, indices, 2, 4, shape[-1]).shape == shape


@pytest.mark.parametrize("pattern", ["2:4", "1:8", "2:8", "3:5", "2:32"])
def test_a_mask_that_keeps_too_many_is_refused(pattern: str, device: str, ours: Ours) -> None:
    for rows in [1, 640]:
        p = Pattern(pattern)
        w, mask = torch.randn(rows, 8 * p.m, device=device), torch.zeros(rows, 8 * p.m, dtype=torch.bool, device=device)
        mask[:, p.m - p.n : p.m] = True
        ours("nm_compress").fn(w, p.n, p.m, mask)
        mask[rows - 1, 8 * p.m - p.n - 1 :] = True
        with pytest.raises(ShapeError, match=f"keeps more than {p.n} elements in a group, but {pattern} stores {p.n}; prune it first"):
            ours("nm_compress").fn(w, p.n, p.m, mask)


@pytest.mark.parametrize(("pattern", "bad"), [("1:8", 15), ("2:8", 9), ("1:32", 255), ("2:5", 7), ("3:6", 9)])
def test_an_index_outside_its_group_writes_nothing(pattern: str, bad: int, device: str, ours: Ours) -> None:
    for groups in [2, 8]:
        p = Pattern(pattern)
        memory = torch.full((3, groups * p.m), 5.0, device=device)
        places = torch.tensor([[*range(p.n - 1), bad] * groups]).to(torch.uint8)
        packed = pack_indices(places, p.index_bits).to(device)
        got = ours("nm_decompress").fn(torch.ones(1, groups * p.n, device=device), packed, p.n, p.m, groups * p.m, memory[1:2])
        assert got.sum() == groups * (p.n - 1)
        assert (memory[[0, 2]] == 5).all()


def test_two_runs_are_equal(device: str, ours: Ours) -> None:
    w = torch.randn(64, 512, device=device)
    testing.assert_equal_bits(ours("nm_compress").fn(w, 2, 4), ours("nm_compress").fn(w, 2, 4))


@pytest.mark.gpu
def test_captured_in_a_graph(device: str, ours: Ours) -> None:
    """A replay packs what the memory then holds; a given mask is not checked there."""
    if device == "cpu":
        pytest.skip("graphs are a GPU's")
    w, mask = torch.randn(64, 512, device=device), torch.ones(64, 512, dtype=torch.bool, device=device)
    ours("nm_compress").fn(w, 2, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ours("nm_compress").fn(w, 2, 4)
        ours("nm_compress").fn(w, 2, 4, mask)
    w.copy_(torch.randn(64, 512))
    graph.replay()
    assert_same(got, reference.compress(w.cpu(), 2, 4))
