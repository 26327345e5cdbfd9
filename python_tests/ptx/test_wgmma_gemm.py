"""The wgmma.sp GEMM as nvcc compiles it, run on the CPU: bit-equal to the product of whole numbers, for every tile and way of storing, in
every mode; and the ways to break it, each reported by name.

What the host passes to the kernel comes from the host's own code; tensor maps are encoded by ``tensor_map``, which checks every limit that
the driver has. A break is one edit of nvcc's text, or of what is passed. Other sizes, types and epilogues: ``backends/cuda/test_wgmma.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nmkernels import reference
from python_tests.backends.cuda import wgmma_calls as calls
from python_tests.backends.cuda.wgmma_calls import BY_COLUMN, TILES

from .breaks import COMMON, PARITY, assert_reported, distances_swapped
from .machine import execute
from .order import Hazard
from .parse import parse
from .tensor_map import TensorMap

MODES: list[str | int] = ["earliest", "latest", 1]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(calls.missing()), reason=calls.missing())]


def run(
    tile: str, by_column: bool, m: int, n: int, k: int, mode: str | int, splits: int = 1, processors: int = 2, code: str = "",
    taller: int = 0, gone: bool = False,
) -> bool:  # fmt: skip
    """Whether the result is right. ``processors`` bounds the blocks; B's boxes have rows more, or B's memory is gone."""
    g = torch.Generator().manual_seed(m + n + k)
    w, x = (torch.randint(-r, r + 1, (size, k), generator=g).bfloat16() for r, size in ((8, m), (4, n)))
    values, indices = reference.compress(w, 2, 4)
    metadata, bias = reference.to_layout(indices, k, "wgmma.sp"), torch.randint(-4, 5, (m,), generator=g).bfloat16()
    want = reference.decompress(values, indices, 2, 4, k).double() @ x.double().T
    want = want if by_column else (want + (bias[:, None] if splits == 1 else 0)).T
    dense, y = x.t().contiguous() if by_column else x, torch.full(want.shape, torch.nan, dtype=torch.bfloat16)
    given = {"bias": None if by_column else bias, "parts": torch.full((splits, *want.shape), torch.nan) if splits > 1 else None}
    maps, parameter, tiles, blocks, threads, shared = calls.launch(tile, values, metadata, dense, y, by_column, splits, processors, **given)
    of_b = TensorMap.unpack(maps[1], "")
    maps[1] = replace(of_b, box=(of_b.box[0], of_b.box[1] + taller)).pack()
    memory = [t for t in (values, metadata, dense, y, *given.values()) if t is not None and not (gone and t is dense)]
    kernel = parse(code or calls.text(tile, by_column=by_column))
    execute(kernel, blocks, [*maps, parameter, tiles], memory, mode=mode, threads=threads, cluster=TILES[tile][3], shared=shared)
    return torch.equal(y, want.bfloat16()) if given["parts"] is None else torch.equal(given["parts"].double().sum(0), want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("tile", "by_column"), [*((t, False) for t in TILES), *((t, True) for t in BY_COLUMN)])
def test_every_tile(tile: str, by_column: bool, mode: str | int) -> None:
    """One tile whole and one of a few columns; and fewer rows than a tile has."""
    rows, cols, _, cluster = TILES[tile]
    assert run(tile, by_column, rows * cluster - 64, cols + 8, 192, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("tile", "by_column", "m", "n", "k", "splits", "processors"),
    [
        ("wide", False, 960, 568, 320, 1, 4),  # six tiles for two clusters, rows and columns left over
        ("square", True, 320, 264, 320, 1, 2),
        ("narrow", False, 192, 72, 448, 3, 3),  # parts of k
        ("broad", True, 320, 200, 448, 2, 6),
        ("narrow", False, 128, 64, 64 * 23, 1, 1),  # stages used more than once
    ],
)
def test_persistent_blocks_and_parts_of_k(tile, by_column, m, n, k, splits, processors, mode) -> None:
    assert run(tile, by_column, m, n, k, mode, splits, processors)


ROW = r"(add\.s32\s+%r\d+, %r\d+), 64;(\s+shr\.u32[^;]*;\s+and\.b32\s+%r\d+, %r\d+), 16324;"
LEAVING = r"barrier\.cluster\.arrive\.\S*;\s*barrier\.cluster\.wait\.\S*;(?![\s\S]*barrier)"
AGAIN = "{ .reg .b32 again; ld.shared.u32 again, [41984]; }"
BREAKS: dict[str, tuple[str, Any, int, str]] = {
    **COMMON,
    "selectors swapped": (r", ([01])(, \w+, 1, 1, 0, [01];)", lambda m: f", {1 - int(m[1])}{m[2]}", 0, "wrong result"),
    "distances swapped": (r"(?<=, )(46116862\d+)(?=;)", distances_swapped, 0, "wrong result|outside shared memory|read before"),
    "B's step of 32": (ROW, r"\1, 32;\2, 16322;", 0, "wrong result"),
    "parity not flipped": (PARITY, r"mov.u32\1\2;", 0, "read before the wait|overwritten|deadlock|more arrivals"),
    "producer's parity not inverted": (r"xor\.b32(\s+%r\d+, %r\d+), 1;", r"xor.b32\1, 0;", 0, "deadlock"),
    "expect_tx a box short": (r"43008;(?=[^;]*mbarrier\.arrive\.expect_tx)", "42496;", 1, "bytes differ|read before the wait"),
    "metadata read after the arrive": (r"(\[remote\];\s*\})", rf"\1 {AGAIN}", 1, "overwritten before it was read|read before the wait"),
    "a stage too many": (r"(setp\.eq\.s32\s+%p\d+, %r\d+), 3;", r"\1, 4;", 0, "overwritten|deadlock|no mbarrier|outside|race|read before"),
    "no wait_group.read": (r"cp\.async\.bulk\.wait_group\.read 1;", "", 0, "overwritten under a bulk store"),
    "no wait_group.read at the end": (r"cp\.async\.bulk\.wait_group\.read 0;", "", 0, "left before wait_group"),
    "no remote arrive": (r"(setp\.gt\.u32\s+%p\d+, %r\d+), 1;", r"\1, 0;", 0, "deadlock"),
    "setmaxnreg by some threads": (r"(setmaxnreg\.inc)", r"@%p1 \1", 0, "divergent warpgroup"),
    "no barrier at the end": (LEAVING, "", 0, "a block (has left|may leave)"),
}  # fmt: skip
"""Of the widest tile."""


SIZES = "wide", False, 512, 192, 448


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_reported(name: str, mode: str | int) -> None:
    assert_reported(lambda code: run(*SIZES, mode, code=code), calls.text("wide"), *BREAKS[name])


@pytest.mark.parametrize("mode", MODES)
def test_a_box_of_another_size(mode: str | int) -> None:
    with pytest.raises(Hazard, match="bytes differ from expect_tx|deadlock|read before the wait|overwritten"):
        run(*SIZES, mode, taller=1)


def test_a_map_of_memory_that_is_gone() -> None:
    with pytest.raises(AssertionError, match="below every tensor|of a tensor of"):
        run(*SIZES, "latest", gone=True)
