"""compress and decompress in Triton: every width of index, rows that end inside a byte or a tile, given masks, damaged indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nmkernels import Pattern, ShapeError, dispatch, reference, testing
from nmkernels.reference import pack_indices

PATTERNS = [
    "2:4",
    "1:4",
    "3:4",
    "4:4",
    "1:1",
    "2:3",
    "1:8",
    "2:8",
    "4:8",
    "3:5",
    "5:16",
    "12:16",
    "1:32",
    "3:32",
    "4:32",
    "8:256",
    "128:256",
]
DTYPES = [torch.float32, torch.bfloat16]


def triton(op: str) -> Callable[..., Any]:
    return next(i.fn for i in dispatch.implementations(op) if i.backend == "triton")


def some_mask(w: Tensor, p: Pattern) -> Tensor:
    """Any number of elements up to N kept in each group, at random places."""
    groups = torch.rand(*w.shape[:-1], w.shape[-1] // p.m, p.m)
    most = torch.randint(0, p.n + 1, (*groups.shape[:-1], 1))
    return (groups.argsort(-1).argsort(-1) < most).flatten(-2).to(w.device)


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    testing.assert_equal_bits(tuple(x.cpu() for x in got), tuple(x.cpu() for x in want))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_equals_the_reference_across_tiles(pattern: str, device: str, poison: None) -> None:
    for dtype in DTYPES:
        for given in [False, True]:
            p = Pattern(pattern)
            # 9 rows: one line of memory or rows of their own, by the pattern; 5 groups end inside a byte, 2500 elements cross tiles
            for rows, cols in ((9, 5 * p.m), (2, 2500 // p.m * p.m + p.m)):
                w = torch.randn(rows, cols).to(dtype).to(device)
                mask = some_mask(w, p) if given else None
                want = reference.compress(w, p.n, p.m, mask)
                assert_same(triton("nm_compress")(w, p.n, p.m, mask), want)
                assert_same((triton("nm_decompress")(*want, p.n, p.m, cols),), (reference.decompress(*want, p.n, p.m, cols),))


def test_partial_last_group(device: str, poison: None) -> None:
    for pattern in ["2:4", "1:8", "3:5", "4:32"]:
        p = Pattern(pattern)
        for missing in (1, p.m - 1):
            wide = 7 * p.m
            values, indices = reference.compress(torch.randn(3, wide, device=device), p.n, p.m)
            want = reference.decompress(values, indices, p.n, p.m, wide - missing)
            assert_same((triton("nm_decompress")(values, indices, p.n, p.m, wide - missing),), (want,))


def test_addresses_that_are_not_aligned(device: str) -> None:
    for pattern in ["2:4", "3:5"]:
        p = Pattern(pattern)
        w = torch.randn(4 * 40 * p.m + 1, device=device, dtype=torch.bfloat16)[1:].view(4, -1)
        want = reference.compress(w, p.n, p.m)
        assert_same(triton("nm_compress")(w, p.n, p.m), want)
        values = torch.cat([want[0].new_zeros(1), want[0].flatten()])[1:].view_as(want[0])
        indices = torch.cat([want[1].new_zeros(3), want[1].flatten()])[3:].view_as(want[1])
        assert_same((triton("nm_decompress")(values, indices, p.n, p.m, w.shape[1]),), (reference.decompress(*want, p.n, p.m, w.shape[1]),))


def test_out(device: str) -> None:
    w = torch.randn(5, 24, device=device)
    want = reference.compress(w, 2, 4)
    out = tuple(testing.fill_poison(torch.empty_like(x)) for x in want)
    got = triton("nm_compress")(w, 2, 4, out=out)
    assert all(a is b for a, b in zip(got, out, strict=True))
    assert_same(out, want)
    dense = testing.fill_poison(torch.empty_like(w))
    assert triton("nm_decompress")(*want, 2, 4, 24, out=dense) is dense
    assert_same((dense,), (reference.prune(w, 2, 4),))


def test_nothing_to_do(device: str) -> None:
    for shape in [(0, 8), (3, 0), (0,)]:
        values, indices = triton("nm_compress")(torch.randn(shape, device=device), 2, 4)
        assert values.numel() == indices.numel() == 0
        assert triton("nm_decompress")(values, indices, 2, 4, shape[-1]).shape == shape


def test_a_mask_that_keeps_too_many_is_refused(device: str) -> None:
    mask = torch.zeros(600, 8, dtype=torch.bool, device=device)
    mask[599, 5:] = True
    with pytest.raises(ShapeError, match="keeps more than 2 elements in a group, but 2:4 stores 2; prune it first"):
        triton("nm_compress")(torch.randn(600, 8, device=device), 2, 4, mask)


@pytest.mark.parametrize(("pattern", "bad"), [("1:8", 15), ("1:32", 255), ("2:5", 7), ("3:6", 9)])
def test_an_index_outside_its_group_writes_nothing(pattern: str, bad: int, device: str) -> None:
    p = Pattern(pattern)
    memory = torch.full((3, 2 * p.m), 5.0, device=device)
    places = torch.tensor([[*range(p.n - 1), bad] * 2]).to(torch.uint8)
    packed = pack_indices(places, p.index_bits).to(device)
    got = triton("nm_decompress")(torch.ones(1, 2 * p.n, device=device), packed, p.n, p.m, 2 * p.m, out=memory[1:2])
    assert got.sum() == 2 * (p.n - 1)
    assert (memory[[0, 2]] == 5).all()
