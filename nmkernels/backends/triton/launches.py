"""How a GEMM with a compressed operand is done: which kernel, in which tiles.

``choose`` takes the plan that ``nm.tune`` found to be the fastest on a device (``search``, kept in the table), else the heuristic's
(``plan``), which counts registers, shared memory and the bytes that cross memory. A line of the table counts for its operation, dtype and
pattern, for the exact rows and columns of the weight, and for token counts that round up to the same power of two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch import implementations
from ...pattern import Pattern
from ...tuning import TABLE, Candidate, Measurement, Seconds, Timer, Validator, cold, key, measure
from . import NAME
from .launch import capability as capability_of
from .launch import cdiv, next_power_of_2

FEW_TOKENS = 4
"""Up to so many tokens fprop is bound by reading the weight, and a kernel without tensor cores keeps up."""

SCRATCH_WIDTH = 512
"""From so many columns of the dense operand on, the compressed one is expanded to memory once and multiplied by the vendor's GEMM.

Counted: expanding 2:4 in bfloat16 takes as long as multiplying 230 (A100) to 380 (H100) columns, which leaves 0.57 to 0.69 of the dense
speed at 512. Expanding in every tile leaves at most 0.52 on Hopper."""

PROCESSORS = {80: 108, 86: 84, 89: 128, 90: 132, 100: 148}
"""Multiprocessors by compute capability, for how many programs fill the GPU; others count as 108."""

SHARED_KB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""Shared memory of one program by compute capability; other devices count as having 64 KB, as AMD's have."""

RESIDENT = 4
"""Programs of narrow tiles that share a multiprocessor, so that one expands while another waits for memory."""

MOST_SPLITS = 16
FEWEST_BLOCKS = 4
"""A part of the columns is at least so many steps, or filling the pipeline takes longer than the steps."""


class Plan(NamedTuple):
    """One way to do a GEMM.

    method: "few" (fprop of a few tokens), "gemm" (expand in registers) or "scratch" (expand to memory, then a dense GEMM).
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
    return dtype.itemsize == 2 and n in (1, 2, 4) and m in (4, 8, 16, 32) and Pattern(n, m).index_bytes(cols) % 4 == 0


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
    """The heuristic, for a compressed operand ``(rows, cols)`` and one of ``width`` columns: tokens, in wgrad the layer's inputs.

    capability: 80, 90, ... of an NVIDIA GPU; 0 for other devices.
    """
    if kind == "fprop" and width <= FEW_TOKENS and cols:
        return Plan("few")
    if width >= SCRATCH_WIDTH or not by_words(dtype, n, m, cols):
        return Plan("scratch")
    return _tiles(kind, dtype, rows, cols, width, n, m, capability)


def _tiles(kind: str, dtype: torch.dtype, rows: int, cols: int, width: int, n: int, m: int, capability: int) -> Plan:
    """The tiles of expanding in registers."""
    tile_width = min(max(next_power_of_2(width), 16), 128)
    if kind == "dgrad":
        step = max(64 if tile_width <= 64 else 128, word_cols(n, m))
        # 4 bytes of values for each of 256 threads at least, or they are not copied ahead
        chosen = Plan("gemm", 128 if m > 16 * n else 64, tile_width, step, 4 if tile_width <= 64 else 8, 3)
        return fitting(chosen, kind, dtype, n, m, capability)
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


METHODS = ("few", "gemm", "scratch")
MOST = {"rows": 1024, "width": 1024, "cols": 1024, "warps": 16, "stages": 8, "splits": 64}
"""Bounds of the numbers of a plan, so that a file that somebody has edited cannot ask for the impossible."""

REMEMBERED = 4096
"""Calls of different sizes whose plans are remembered; then all are forgotten and looked up again."""

KINDS = {"nm_linear": "fprop", "nm_linear_dgrad": "dgrad", "nm_linear_wgrad": "wgrad"}


class Gemm(NamedTuple):
    """A GEMM with a compressed operand, as ``plan`` describes it, and where it runs."""

    kind: str
    dtype: torch.dtype
    rows: int
    cols: int
    width: int
    n: int
    m: int
    device: torch.device
    capability: int


_plans: dict[Gemm, Plan] = {}


def choose(
    kind: str, dtype: torch.dtype, rows: int, cols: int, width: int, n: int, m: int, device: torch.device, capability: int
) -> Plan:  # fmt: skip
    """How this GEMM is done on ``device``: as measured there, else as the heuristic has it."""
    sizes = (kind, dtype, rows, cols, width, n, m, device, capability)
    found = _plans.get(sizes)  # type: ignore[call-overload]  # a GEMM is such a tuple
    if found is None:
        if len(_plans) >= REMEMBERED:
            _plans.clear()
        gemm = Gemm(*sizes)
        found = _plans[gemm] = measured(gemm) or plan(*sizes[:-2], capability)
    return found


def measured(gemm: Gemm) -> Plan | None:
    """The table's plan; None where it has none, or one that is no plan."""
    given = (TABLE.get(name(gemm)) or {}).get("choice")
    if not isinstance(given, dict) or set(given) != set(Plan._fields) or given["method"] not in METHODS:
        return None
    if not all(type(given[k]) is int and 1 <= given[k] <= most for k, most in MOST.items()):
        return None
    few = gemm.kind == "fprop" and gemm.width <= FEW_TOKENS and gemm.cols > 0
    return Plan(**given) if few or given["method"] != "few" else None


def name(gemm: Gemm) -> str:
    """The line of a GEMM in the table; along the tokens, its size, the compressed operand of wgrad runs."""
    kind, dtype, rows, cols, width, n, m = gemm[:7]
    fixed, tokens = (width, cols) if kind == "wgrad" else (cols, width)
    return key("triton", gemm.device, f"{kind}|{str(dtype).removeprefix('torch.')}|{n}:{m}|{rows}x{fixed}", tokens)


def words(p: Plan) -> str:
    """A plan in words: its method, and the numbers that matter to it."""
    numbers = {} if p.method == "scratch" else {k: v for k, v in p._asdict().items() if k != "method"}
    return " ".join([p.method, *(f"{k}={v}" for k, v in numbers.items())])


@torch.no_grad()
def search(op: str, *args: Any, timer: Seconds | None = None) -> Measurement:
    """Find the fastest right plan for a raw op's call, and follow it from now on; the arguments' numbers do not matter."""
    kind = KINDS[op]
    (values, _, n, m, cols), other = (args[:5], args[5]) if kind == "wgrad" else (args[1:6], args[0])
    width = other.shape[1] if kind == "wgrad" else other.numel() // other.shape[-1]
    sizes = (kind, other.dtype, values.shape[0], cols, width, n, m)
    capability = capability_of(other)
    gemm, fn = Gemm(*sizes, other.device, capability), next(i.fn for i in implementations(op) if i.backend == NAME)
    given, validator = _operands(gemm)

    def run(p: Plan, operands: tuple[Any, ...], out: Tensor | None = None) -> object:
        _plans[gemm] = p
        return fn(*operands, out=out)

    sets: list[tuple[Any, ...]] = []  # made when all are checked, and for all that are right

    def calls(p: Plan) -> list[Callable[[], object]]:
        if not sets:
            sets.extend(cold(given))
        return [partial(run, p, operands) for operands in sets]

    plans = {words(p): p for p in candidates(*sizes, capability)}
    some = [Candidate(text, lambda out, p=p: run(p, given, out), partial(calls, p)) for text, p in plans.items()]  # type: ignore[misc]
    try:
        found = measure(name(gemm), some, validator, Timer(other.device, timer))
    finally:
        _plans.clear()
    kept = found.seconds and found.best != found.baseline
    found.store({found.problem: found.line(plans[found.best]._asdict()) if kept else None})
    return found


def _operands(gemm: Gemm) -> tuple[tuple[Any, ...], Validator]:
    """Random arguments of a GEMM's op, and what is right for them."""
    kind, dtype, rows, cols, width, n, m, device, _ = gemm
    pattern = Pattern(n, m)
    generator = torch.Generator(device).manual_seed(24)

    def matrix(height: int, across: int) -> Tensor:
        return torch.randn((height, across), generator=generator, dtype=dtype, device=device)

    e = matrix(rows, pattern.groups(cols) * m)
    e[:, cols:] = 0  # along tokens the last group may be partial
    values, indices = torch.ops.nmkernels.nm_compress(e, n, m, None)
    dense = torch.ops.nmkernels.nm_decompress(values, indices, n, m, cols)
    if kind == "wgrad":
        x = matrix(cols, width)
        return (values, indices, n, m, cols, x), Validator.of_gemm(dense, x)
    if kind == "dgrad":
        g = matrix(width, rows)
        return (g, values, indices, n, m, cols), Validator.of_gemm(g, dense)
    x = matrix(width, cols)
    return (x, values, indices, n, m, cols, None), Validator.of_gemm(x, dense.t())
