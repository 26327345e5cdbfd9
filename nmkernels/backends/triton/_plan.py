"""How a product with a compressed operand is done: which kernel, in which tiles. One pure function of the sizes, and its alternatives.

Nothing here has been measured: the numbers are reckoned from registers, shared memory and the bytes that cross memory.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from ...pattern import Pattern
from ._launch import cdiv, next_power_of_2

FEW_TOKENS = 4
"""Up to so many tokens fprop is bound by reading the weight, and a kernel without tensor cores keeps up."""

SCRATCH_WIDTH = 512
"""From so many columns of the dense operand on, the compressed one is expanded to memory once and multiplied by the vendor's product.

Counted, not measured: expanding 2:4 in bfloat16 takes as long as multiplying 230 (A100) to 380 (H100) columns, which leaves 0.57 to 0.69 of
the dense speed at 512. Expanding in every tile leaves at most 0.52 on Hopper where a multiprocessor has one tile, as 4096 rows give at 512
columns: of a step, 8 warps issue 233 instructions each, 466 clocks, and then wait for wgmma, 512 clocks."""

SCRATCH_WIDTH_FP32 = 128
"""The same in float32, where no tensor core makes up for a slower inner loop than the vendor's."""

SCRATCH_WIDTH_PIECES = 32
"""The same for patterns that are expanded piecewise, whose loads do not overlap with the product."""

MOST_PIECES_M = 64
"""Above, a tile of whole groups does not fit into registers: the operand is always expanded to memory."""

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

    method: "few" (fprop of a few tokens), "gemm" (expand in registers), "scratch" (expand to memory, then a dense product), or "tile": few
    tokens with a tile of ``tuned.tile_of`` instead of the heuristic's.
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
    """Whether the kernels may read the values and the indices of whole groups at once, as ``_expand`` wants it; else piecewise."""
    small = n in (1, 2, 4) and n * dtype.itemsize <= 8
    return small and m in (4, 8, 16, MOST_WORD_M) and Pattern(n, m).index_bytes(cols) % 4 == 0


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
    words = by_words(dtype, n, m, cols)
    if kind == "fprop" and width <= FEW_TOKENS and cols:
        return Plan("few")
    widest = SCRATCH_WIDTH_PIECES if not words else SCRATCH_WIDTH_FP32 if dtype == torch.float32 else SCRATCH_WIDTH
    if width >= widest or (m > MOST_PIECES_M and not words):
        return Plan("scratch")
    return _tiles(kind, dtype, rows, cols, width, n, m, words, capability)


def _tiles(kind: str, dtype: torch.dtype, rows: int, cols: int, width: int, n: int, m: int, words: bool, capability: int) -> Plan:
    """The tiles of expanding in registers."""
    if kind == "dgrad":
        return fitting(_dgrad(dtype, width, n, m, words), kind, dtype, n, m, capability)
    return _gemm(dtype, rows, cols, width, n, m, words, capability)


def _gemm(dtype: torch.dtype, rows: int, cols: int, width: int, n: int, m: int, words: bool, capability: int) -> Plan:
    tile_width = min(max(next_power_of_2(width), 16), 128)
    if not words:
        chosen = Plan("gemm", 64, min(tile_width, 64), max(32, next_power_of_2(m)), 4, 2)
    elif dtype == torch.float32:
        chosen = Plan("gemm", 64, min(tile_width, 64), 32, 4, 3)
    elif tile_width <= 64:
        # the sparser the pattern, the longer a step must be to have enough bytes in flight
        step = 64 if tile_width == 64 else 128 if 4 * n >= m else 256
        chosen = Plan("gemm", 64, tile_width, step, 4, 3)
    else:
        chosen = Plan("gemm", 128, 128, 64, 8, 3)
    if words:
        chosen = chosen._replace(cols=max(chosen.cols, word_cols(n, m)))
    chosen = fitting(chosen, "fprop", dtype, n, m, capability)
    tiles = cdiv(rows, chosen.rows) * cdiv(width, chosen.width)
    wanted = PROCESSORS.get(capability, 108) * (RESIDENT if chosen.width <= 32 else 1)
    most = max(1, min(MOST_SPLITS, cdiv(cols, chosen.cols) // FEWEST_BLOCKS))
    return chosen._replace(splits=max(1, min(most, wanted // max(tiles, 1))))


def _dgrad(dtype: torch.dtype, width: int, n: int, m: int, words: bool) -> Plan:
    tile_width = min(max(next_power_of_2(width), 16), 128 if dtype != torch.float32 and words else 64)
    if not words:
        return Plan("gemm", 32, tile_width, max(32, next_power_of_2(m)), 4, 2)
    if dtype == torch.float32:
        return Plan("gemm", 32, tile_width, max(32, word_cols(n, m)), 4, 2)
    cols = max(64 if tile_width <= 64 else 128, word_cols(n, m))
    # 4 bytes of values for each of 256 threads at least, or they are not copied ahead
    return Plan("gemm", 128 if m > 16 * n else 64, tile_width, cols, 4 if tile_width <= 64 else 8, 3)


def candidates(kind: str, dtype: torch.dtype, rows: int, cols: int, width: int, n: int, m: int, capability: int = 90) -> list[Plan]:
    """Plans worth timing, the heuristic's first."""
    first = plan(kind, dtype, rows, cols, width, n, m, capability)
    made = [first, Plan("scratch")]
    if kind == "fprop" and width <= FEW_TOKENS and cols:
        made.append(Plan("few"))
    words = by_words(dtype, n, m, cols)
    base = _tiles(kind, dtype, rows, cols, width, n, m, words, capability)
    made.append(base)
    made += [base._replace(stages=s) for s in (2, 3, 4, 5) if words]
    made += [base._replace(cols=c) for c in (base.cols // 2, base.cols * 2) if words and word_cols(n, m) <= c <= 256]
    if dtype != torch.float32 and words:
        made += [base._replace(rows=128, warps=8), base._replace(width=256, warps=8)] if width >= 128 else [base._replace(rows=128)]
    if kind != "dgrad":
        made += [base._replace(splits=s) for s in (base.splits // 2, base.splits * 2, 1) if 1 <= s <= MOST_SPLITS]
    most = SHARED_KB.get(capability, 64) << 10
    return [p for p in dict.fromkeys(made) if p.method != "gemm" or shared_bytes(p, kind, dtype, n, m) <= most]
