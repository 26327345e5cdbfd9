"""How a product with a compressed operand is done: which kernel, in which tiles. One pure function of the sizes, and its alternatives.

Nothing here has been measured: the numbers are reckoned from registers, shared memory and the bytes that cross memory.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from ...pattern import Pattern
from .launch import cdiv, next_power_of_2

FEW_TOKENS = 4
"""Up to so many tokens fprop is bound by reading the weight, and a kernel without tensor cores keeps up."""

SCRATCH_WIDTH = 512
"""From so many columns of the dense operand on, the compressed one is expanded to memory once and multiplied by the vendor's product.

Counted, not measured: expanding 2:4 in bfloat16 takes as long as multiplying 230 (A100) to 380 (H100) columns, which leaves 0.57 to 0.69 of
the dense speed at 512. Expanding in every tile leaves at most 0.52 on Hopper where a multiprocessor has one tile, as 4096 rows give at 512
columns: of a step, 8 warps issue 233 instructions each, 466 clocks, and then wait for wgmma, 512 clocks."""

PROCESSORS = {80: 108, 86: 84, 89: 128, 90: 132, 100: 148}
"""Multiprocessors by compute capability, for how many programs fill the GPU; others count as 108."""

SHARED_KB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""Shared memory of one program by compute capability; other devices count as having 64 KB, as AMD's have."""

RESIDENT = 4
"""Programs of narrow tiles that share a multiprocessor, so that one expands while another waits for memory."""

MOST_SPLITS = 16
FEWEST_BLOCKS = 4
"""A part of the columns is at least so many steps, or filling the pipeline takes longer than the steps."""

MOST_WORD_M = 32


class Plan(NamedTuple):
    """One way to do a product.

    method: "few" (fprop of a few tokens), "gemm" (expand in registers) or "scratch" (expand to memory, then a dense product).
    rows: of the compressed operand in a tile (dgrad: in a step). width: columns of the dense operand in a tile (dgrad: its tokens).
    cols: of the compressed operand in a step (dgrad: in a tile); a whole number of groups. splits: parts that the columns are cut into.
    """

    method: str
    rows: int = 64
    width: int = 16
    cols: int = 128
    warps: int = 4
    stages: int = 3
    splits: int = 1


def by_words(dtype: torch.dtype, n: int, m: int, cols: int) -> bool:
    """Whether the operand can be expanded in registers: in 16 bits, the values and the indices of whole groups read at once."""
    return dtype.itemsize == 2 and n in (1, 2, 4) and m in (4, 8, 16, MOST_WORD_M) and Pattern(n, m).index_bytes(cols) % 4 == 0


def shared_bytes(p: Plan, kind: str, dtype: torch.dtype, n: int, m: int) -> int:
    """What the kernel of a plan needs at most: tiles on their way, one of them less of the compressed operand, and the expanded tile."""
    kept = p.cols * n // m
    packed_tile = p.rows * kept * dtype.itemsize + p.rows * kept * Pattern(n, m).index_bits // 8
    dense_tile = p.width * (p.rows if kind == "dgrad" else p.cols) * dtype.itemsize
    return (p.stages - 1) * packed_tile + p.stages * dense_tile + p.rows * p.cols * dtype.itemsize


def fitting(p: Plan, kind: str, dtype: torch.dtype, n: int, m: int, capability: int) -> Plan:
    """A plan with fewer stages, then with smaller tiles, until it fits into shared memory."""
    most = SHARED_KB.get(capability, 64) << 10
    while shared_bytes(p, kind, dtype, n, m) > most and (p.stages > 2 or p.width > 16):
        p = p._replace(stages=p.stages - 1) if p.stages > 2 else p._replace(width=p.width // 2)
    return p


def word_cols(n: int, m: int) -> int:
    """Columns whose indices fill one 32-bit word."""
    return m * 32 // (Pattern(n, m).index_bits * n)


@lru_cache(maxsize=4096)
def plan(kind: str, dtype: torch.dtype, rows: int, cols: int, width: int, n: int, m: int, capability: int = 90) -> Plan:
    """The heuristic.

    Args:
        kind: "fprop", "dgrad" or "wgrad". dtype: of the operands.
        rows, cols: of the compressed operand. width: columns of the other one: tokens, in wgrad the layer's inputs.
        n, m: the pattern. capability: 80, 90, ... of an NVIDIA GPU; 0 for other devices.
    """
    if kind == "fprop" and width <= FEW_TOKENS and cols:
        return Plan("few")
    if width >= SCRATCH_WIDTH or not by_words(dtype, n, m, cols):
        return Plan("scratch")
    return _tiles(kind, dtype, rows, cols, width, n, m, capability)


def _tiles(kind: str, dtype: torch.dtype, rows: int, cols: int, width: int, n: int, m: int, capability: int) -> Plan:
    """The tiles of expanding in registers."""
    if kind == "dgrad":
        return fitting(_dgrad(width, n, m), kind, dtype, n, m, capability)
    return _gemm(dtype, rows, cols, width, n, m, capability)


def _gemm(dtype: torch.dtype, rows: int, cols: int, width: int, n: int, m: int, capability: int) -> Plan:
    tile_width = min(max(next_power_of_2(width), 16), 128)
    if tile_width <= 64 or word_cols(n, m) > 64:
        chosen = Plan("gemm", 64, min(tile_width, 64), 64 if tile_width >= 64 else 128, 4, 3)
    else:
        chosen = Plan("gemm", 128, 128, 64, 8, 3)
    chosen = chosen._replace(cols=max(chosen.cols, word_cols(n, m)))
    chosen = fitting(chosen, "fprop", dtype, n, m, capability)
    tiles = cdiv(rows, chosen.rows) * cdiv(width, chosen.width)
    wanted = PROCESSORS.get(capability, 108) * (RESIDENT if chosen.width <= 32 else 1)
    most = max(1, min(MOST_SPLITS, cdiv(cols, chosen.cols) // FEWEST_BLOCKS))
    return chosen._replace(splits=max(1, min(most, wanted // max(tiles, 1))))


def _dgrad(width: int, n: int, m: int) -> Plan:
    tile_width = min(max(next_power_of_2(width), 16), 128)
    cols = max(64 if tile_width <= 64 else 128, word_cols(n, m))
    # 4 bytes of values for each of 256 threads at least, or they are not copied ahead
    return Plan("gemm", 128 if m > 16 * n else 64, tile_width, cols, 4 if tile_width <= 64 else 8, 3)


def candidates(kind: str, dtype: torch.dtype, rows: int, cols: int, width: int, n: int, m: int, capability: int = 90) -> list[Plan]:
    """Plans worth timing, the heuristic's first."""
    first = plan(kind, dtype, rows, cols, width, n, m, capability)
    made = [first, Plan("scratch")]
    if kind == "fprop" and width <= FEW_TOKENS and cols:
        made.append(Plan("few"))
    if not by_words(dtype, n, m, cols):
        return list(dict.fromkeys(made))
    base = _tiles(kind, dtype, rows, cols, width, n, m, capability)
    made.append(base)
    made += [base._replace(stages=s) for s in (2, 3, 4, 5)]
    made += [base._replace(cols=c) for c in (base.cols // 2, base.cols * 2) if word_cols(n, m) <= c <= 256]
    made += [base._replace(rows=128, warps=8), base._replace(width=256, warps=8)] if width >= 128 else [base._replace(rows=128)]
    if kind != "dgrad":
        made += [base._replace(splits=s) for s in (base.splits // 2, base.splits * 2, 1) if 1 <= s <= MOST_SPLITS]
    most = SHARED_KB.get(capability, 64) << 10
    return [p for p in dict.fromkeys(made) if p.method != "gemm" or shared_bytes(p, kind, dtype, n, m) <= most]
