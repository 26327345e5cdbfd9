"""The wgmma.sp GEMM as nvcc compiles it, run on the CPU: bit-equal to the product of whole numbers, for every tile and way of storing, in
every mode; and the ways to break it, each reported by name.

What the host passes to the kernel comes from the host's own code, ``gemm_wgmma_launch``; tensor maps are encoded by ``tensor_map``, which
checks every limit that the driver has. A break is one edit of nvcc's text, or of what is passed.
"""

from __future__ import annotations

import importlib
import re
from functools import lru_cache
from typing import Any

import pytest
import torch

from nmkernels import reference

from .breaks import COMMON, PARITY, distances_swapped, edited
from .machine import execute
from .nvcc import CSRC, NVCC, ptx
from .order import Hazard
from .parse import parse
from .tensor_map import encode

SOURCE = CSRC / "cuda" / "gemm" / "wgmma_sp.cu"
MODES: list[str | int] = ["earliest", "latest", 1]
TILES = [(256, 192, 2), (256, 128, 2), (128, 128, 2), (128, 64, 1), (128, 16, 1)]
"""Rows, columns and blocks of a cluster, by the code of the tile."""
DTYPES = {"bf16": (torch.bfloat16, 9), "fp16": (torch.float16, 6)}


def host() -> Any:
    """The compiled module that knows how the kernel is launched, if there is one."""
    for name in ("nmkernels._emulated", "nmkernels._C"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module, "gemm_wgmma_launch"):
            return module
    return None


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NVCC is None or not SOURCE.is_file(), reason="no nvcc, or not a source checkout"),
    pytest.mark.skipif(host() is None, reason="no module with gemm_wgmma_launch: NMKERNELS_EMULATOR=1 at the build"),
]


@lru_cache(4)
def text(tile: int, by_column: bool, dtype: str) -> str:
    """The one kernel of the module, so that an edit is one of it."""
    whole = ptx(SOURCE, "sm_90a", "-DNM_SM90A")
    starts = [m.start() for m in re.finditer(r"(?:\.visible )?\.entry", whole)]
    rows, cols, _ = TILES[tile]
    name = rf"wgmma_sp_kernelINS_4{dtype}E\w*WideTileILi{rows}ELi{cols}E\w*EELb{int(by_column)}E"
    (found,) = [whole[a:b] for a, b in zip(starts, [*starts[1:], len(whole)], strict=True) if re.search(name, whole[a:b].split("(")[0])]
    return whole[: starts[0]] + found


def run(
    tile: int,
    by_column: bool,
    m: int,
    n: int,
    k: int,
    mode: str | int,
    dtype: str = "bf16",
    splits: int = 1,
    processors: int = 2,
    code: str = "",
    taller: int = 0,
    gone: bool = False,
) -> bool:
    """Whether the result is right. ``processors`` bounds the blocks; B's boxes have rows more, or B's memory is gone."""
    kind, enum = DTYPES[dtype]
    g = torch.Generator().manual_seed(m + n + k)
    w, x = (torch.randint(-r, r + 1, (size, k), generator=g).to(kind) for r, size in ((8, m), (4, n)))
    values, indices = reference.compress(w, 2, 4)
    metadata = reference.to_layout(indices, k, "wgmma.sp")
    want = reference.decompress(values, indices, 2, 4, k).double() @ x.double().T
    dense = x.t().contiguous() if by_column else x
    bias = None if by_column else torch.randint(-4, 5, (m,), generator=g).to(kind)
    want = want if by_column else (want if bias is None or splits > 1 else want + bias[:, None]).T
    out = torch.full(want.shape, torch.nan, dtype=kind)
    parts = torch.full((splits, *want.shape), torch.nan) if splits > 1 else None
    at = [0 if t is None else t.data_ptr() for t in (values, metadata, dense, bias, None, out, parts)]
    numbers, parameter, tiles, blocks, threads, shared = host().gemm_wgmma_launch(
        *at, 0, m, n, k, by_column, tile, splits, False, processors
    )
    maps = []
    for i in range(3):
        address, inner, outer, box_inner, box_outer, swizzle = numbers[6 * i : 6 * i + 6]
        box = box_inner, box_outer + (taller if i == 1 else 0)
        maps.append(encode(enum, address, (inner, outer), (2 * inner,), box, swizzle={1: 3, 2: 2}[swizzle]))
    memory = [t for t in (values, metadata, dense, bias, out, parts) if t is not None and not (gone and t is dense)]
    kernel = parse(code or text(tile, by_column, dtype))
    execute(kernel, blocks, [*maps, parameter, tiles], memory, mode=mode, threads=threads, cluster=TILES[tile][2], shared=shared)
    return torch.equal(parts.double().sum(0), want) if parts is not None else torch.equal(out, want.to(kind))


CASES = [(tile, by_column) for tile in range(len(TILES)) for by_column in (False, True) if not by_column or TILES[tile][1] % 64 == 0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("tile", "by_column"), CASES)
def test_every_tile(tile: int, by_column: bool, mode: str | int) -> None:
    """One tile whole and one of a few columns; and fewer rows than a tile has."""
    rows, cols, cluster = TILES[tile]
    assert run(tile, by_column, rows * cluster - 64, cols + 8, 192, mode)


@pytest.mark.parametrize(("tile", "by_column"), [(0, False), (0, True), (4, False)])
def test_fp16(tile: int, by_column: bool) -> None:
    rows, cols, cluster = TILES[tile]
    assert run(tile, by_column, rows * cluster, cols, 128, "latest", dtype="fp16")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("tile", "by_column", "m", "n", "k", "splits", "processors"),
    [
        (0, False, 960, 568, 320, 1, 4),  # six tiles for two clusters, rows and columns left over
        (2, True, 320, 264, 320, 1, 2),
        (3, False, 192, 72, 448, 3, 3),  # parts of k
        (1, True, 320, 200, 448, 2, 6),
        (3, False, 128, 64, 64 * 23, 1, 1),  # stages used more than once
    ],
)
def test_persistent_blocks_and_parts_of_k(tile, by_column, m, n, k, splits, processors, mode) -> None:
    assert run(tile, by_column, m, n, k, mode, splits=splits, processors=processors)


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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_reported(name: str, mode: str | int) -> None:
    *edit, expected = BREAKS[name]
    try:
        right = run(0, False, 512, 192, 448, mode, code=edited(text(0, False, "bf16"), *edit))
    except Hazard as hazard:
        assert re.match(expected, str(hazard)), str(hazard)
    else:
        assert not right and "wrong result" in expected


@pytest.mark.parametrize("mode", MODES)
def test_a_box_of_another_size(mode: str | int) -> None:
    with pytest.raises(Hazard, match="bytes differ from expect_tx|deadlock|read before the wait|overwritten"):
        run(0, False, 512, 192, 448, mode, taller=1)


def test_a_map_of_memory_that_is_gone() -> None:
    with pytest.raises(AssertionError, match="below every tensor|of a tensor of"):
        run(0, False, 512, 192, 448, "latest", gone=True)
