"""How a product of few tokens is cut into programs: the heuristic, and its alternatives."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import NamedTuple

from ...pattern import Pattern
from ._launch import cdiv, next_power_of_2

PROCESSORS = 132
"""Multiprocessors to fill: those of an H200, which is enough for smaller GPUs too."""

STAGED_WORDS = 4096
"""Floats of x in shared memory for a step of one program: 16 KiB, so that eight programs share a multiprocessor."""


class Tile(NamedTuple):
    """How a product of few tokens is cut up; the names are those of the kernels' constexprs. ``staged`` tells the kernel."""

    staged: bool
    rows: int
    chunks: int
    lanes: int
    warps: int
    ahead: bool
    steps: int
    splits: int


@lru_cache(maxsize=4096)
def plan(size: int, n: int, m: int, rows: int, cols: int, tokens: int) -> Tile:
    """The heuristic, from the bytes of an element, the pattern and the sizes.

    An H200 needs some 30 KB on their way for each multiprocessor. Tiles of 4 warps read 8 KB of values at once, and eight of them share a
    multiprocessor, in large matrices. Where there are fewer than four tiles for each, tiles have 2 warps, read twice as much a thread and
    that a step ahead: 4096 rows of 2:4 are then 512 programs, four for each multiprocessor. Only where even those leave some idle are
    columns cut into parts, of at least two steps, since a second kernel that adds the parts costs as much as reading some 8 MB.
    """
    lanes = 8 if m <= 4 else 4
    warps, chunks = 4, 4
    ahead = cdiv(rows, warps * 32 // lanes) < 4 * PROCESSORS
    if ahead:
        warps, chunks = 2, 8
    while chunks > 1 and chunks * _span(size, n, m, tokens, lanes) > STAGED_WORDS:
        chunks //= 2
    whole = cut(size, n, m, cols, lanes, chunks, warps, ahead, 1)
    splits = max(1, min(cdiv(PROCESSORS, cdiv(rows, whole.rows)), whole.steps // 2, 16))
    return cut(size, n, m, cols, lanes, chunks, warps, ahead, splits)


def _span(size: int, n: int, m: int, tokens: int, lanes: int) -> int:
    """Numbers of x that a chunk stages."""
    return lanes * (16 // size) * m // n * next_power_of_2(tokens)


@lru_cache(maxsize=4096)
def cut(size: int, n: int, m: int, cols: int, lanes: int, chunks: int, warps: int, ahead: bool, splits: int) -> Tile:
    """The tile of these numbers, with columns cut into at most ``splits`` parts."""
    vec, kept = 16 // size, Pattern(n, m).kept(cols)
    step = chunks * lanes * vec
    steps = cdiv(cdiv(kept, step), splits)
    staged = n in (1, 2, 4, 8) and m in (2, 4, 8, 16, 32) and cols % m == 0 and kept % vec == 0
    return Tile(staged, warps * 32 // lanes, chunks, lanes, warps, ahead, steps, cdiv(kept, steps * step))


def variants(size: int, n: int, m: int, rows: int, cols: int, tokens: int) -> list[Tile]:
    """Tiles worth timing beside the heuristic's."""
    first = plan(size, n, m, rows, cols, tokens)
    found = []
    for warps, chunks, ahead, splits in product((2, 4), (2, 4, 8), (False, True), {first.splits, 2 * first.splits}):
        if chunks * _span(size, n, m, tokens, first.lanes) <= STAGED_WORDS:
            found.append(cut(size, n, m, cols, first.lanes, chunks, warps, ahead, splits))
    return [t for t in dict.fromkeys(found) if t != first]
