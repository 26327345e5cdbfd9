"""Choose the kernel and tiles of a GEMM with a compressed operand.

``choose`` returns the plan that ``nm.tune`` measured to be fastest on a device (``search``, stored in the table of measurements), else the
heuristic's (``plan``), which models registers, shared memory and memory traffic. A line of the table applies to one operation, dtype,
pattern and weight shape, and to token counts that round up to the same power of two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch import implementations
from ...pattern import Pattern
from ...timing import TABLE, Candidate, Measurement, Seconds, Timer, Validator, cold, key, measure
from . import NAME
from .launch import capability as capability_of
from .launch import cdiv, next_power_of_2

FEW_TOKENS = 4
"""The most tokens for which fprop is bound by reading the weight, so that a kernel without tensor cores is fast enough."""

SCRATCH_WIDTH = 512
"""The number of columns of the dense operand from which the compressed one is expanded to memory and multiplied by the vendor's GEMM.

Estimated: expanding 2:4 in bfloat16 takes as long as multiplying 230 (A100) to 380 (H100) columns, which leaves 0.57 to 0.69 of the dense
speed at 512. Expanding in every tile leaves at most 0.52 on Hopper."""

PROCESSORS = {80: 108, 86: 84, 89: 128, 90: 132, 100: 148}
"""Compute capability → multiprocessors, to tell how many programs fill the GPU; 108 for others."""

SHARED_KB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""Compute capability → shared memory of one program in KB; 64 for other devices, as on AMD GPUs."""

RESIDENT = 4
"""Programs with narrow tiles per multiprocessor, so that one expands while another waits for memory."""

MOST_SPLITS = 16
FEWEST_BLOCKS = 4
"""The fewest steps per part of the columns; with fewer, filling the pipeline takes longer than the steps."""


class Tiling(NamedTuple):
    """The kernel of a GEMM and its tiles.

    Args:
        method: "few" (fprop of a few tokens), "gemm" (expand in registers) or "scratch" (expand to memory, then a dense GEMM).
        rows: rows of the compressed operand in a tile (dgrad: in a step).
        width: columns of the dense operand in a tile (dgrad: its tokens).
        cols: columns of the compressed operand in a step (dgrad: in a tile); a multiple of M.
        warps, stages: Triton's ``num_warps`` and ``num_stages``.
        splits: the number of parts that the columns are cut into.
    """

    method: str
    rows: int = 64
    width: int = 16
    cols: int = 128
    warps: int = 4
    stages: int = 3
    splits: int = 1


def by_words(dtype: torch.dtype, n: int, m: int, cols: int) -> bool:
    """Whether the operand can be expanded in registers: 16-bit values, and groups whose values and indices are read at once."""
    return dtype.itemsize == 2 and n in (1, 2, 4) and m in (4, 8, 16, 32) and Pattern(n, m).index_bytes(cols) % 4 == 0


def shared_bytes(p: Tiling, kind: str, dtype: torch.dtype, n: int, m: int) -> int:
    """The most shared memory that a plan needs: tiles in flight (one fewer of the compressed operand) and the expanded tile."""
    stored = p.cols * n // m
    packed_tile = p.rows * stored * dtype.itemsize + p.rows * stored * Pattern(n, m).index_bits // 8
    dense_tile = p.width * (p.rows if kind == "dgrad" else p.cols) * dtype.itemsize
    return (p.stages - 1) * packed_tile + p.stages * dense_tile + p.rows * p.cols * dtype.itemsize


def fitting(p: Tiling, kind: str, dtype: torch.dtype, n: int, m: int, capability: int) -> Tiling:
    """Reduce the stages of a plan, then its tiles, until it fits into shared memory."""
    most = SHARED_KB.get(capability, 64) << 10
    while shared_bytes(p, kind, dtype, n, m) > most and (p.stages > 2 or p.width > 16):
        p = p._replace(stages=p.stages - 1) if p.stages > 2 else p._replace(width=p.width // 2)
    return p


def word_cols(n: int, m: int) -> int:
    """Columns whose indices fill one 32-bit word."""
    return m * 32 // (Pattern(n, m).index_bits * n)


@lru_cache(maxsize=4096)
def plan(kind: str, dtype: torch.dtype, rows: int, cols: int, width: int, n: int, m: int, capability: int = 90) -> Tiling:
    """The heuristic plan for a compressed operand ``(rows, cols)`` and a dense one with ``width`` columns (tokens; in wgrad inputs).

    ``capability``: 80, 90, ... for NVIDIA GPUs, 0 for other devices.
    """
    if kind == "fprop" and width <= FEW_TOKENS and cols:
        return Tiling("few")
    if width >= SCRATCH_WIDTH or not by_words(dtype, n, m, cols):
        return Tiling("scratch")
    return _tiles(kind, dtype, rows, cols, width, n, m, capability)


def _tiles(kind: str, dtype: torch.dtype, rows: int, cols: int, width: int, n: int, m: int, capability: int) -> Tiling:
    """The tiles for expanding in registers."""
    tile_width = min(max(next_power_of_2(width), 16), 128)
    if kind == "dgrad":
        step = max(64 if tile_width <= 64 else 128, word_cols(n, m))
        # at least 4 bytes of values for each of 256 threads, else Triton does not copy them asynchronously
        chosen = Tiling("gemm", 128 if m > 16 * n else 64, tile_width, step, 4 if tile_width <= 64 else 8, 3)
        return fitting(chosen, kind, dtype, n, m, capability)
    if tile_width <= 64 or word_cols(n, m) > 64:
        chosen = Tiling("gemm", 64, min(tile_width, 64), 64 if tile_width >= 64 else 128, 4, 3)
    else:
        chosen = Tiling("gemm", 128, 128, 64, 8, 3)
    chosen = chosen._replace(cols=max(chosen.cols, word_cols(n, m)))
    chosen = fitting(chosen, "fprop", dtype, n, m, capability)
    tiles = cdiv(rows, chosen.rows) * cdiv(width, chosen.width)
    wanted = PROCESSORS.get(capability, 108) * (RESIDENT if chosen.width <= 32 else 1)
    most = max(1, min(MOST_SPLITS, cdiv(cols, chosen.cols) // FEWEST_BLOCKS))
    return chosen._replace(splits=max(1, min(most, wanted // max(tiles, 1))))


def candidates(kind: str, dtype: torch.dtype, rows: int, cols: int, width: int, n: int, m: int, capability: int = 90) -> list[Tiling]:
    """Plans worth timing, the heuristic's first."""
    first = plan(kind, dtype, rows, cols, width, n, m, capability)
    made = [first, Tiling("scratch")]
    if kind == "fprop" and width <= FEW_TOKENS and cols:
        made.append(Tiling("few"))
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
"""Upper bounds of a plan's numbers, to reject an edited table with impossible plans."""

REMEMBERED = 4096
"""Size of the cache of plans; when full it is cleared."""

KINDS = {"nm_linear": "fprop", "nm_linear_dgrad": "dgrad", "nm_linear_wgrad": "wgrad"}


class Gemm(NamedTuple):
    """A GEMM with a compressed operand (the arguments of ``plan``) and its device."""

    kind: str
    dtype: torch.dtype
    rows: int
    cols: int
    width: int
    n: int
    m: int
    device: torch.device
    capability: int


_plans: dict[Gemm, Tiling] = {}


def choose(
    kind: str, dtype: torch.dtype, rows: int, cols: int, width: int, n: int, m: int, device: torch.device, capability: int
) -> Tiling:  # fmt: skip
    """The plan of a GEMM on ``device``: the measured one, else the heuristic's."""
    sizes = (kind, dtype, rows, cols, width, n, m, device, capability)
    chosen = _plans.get(sizes)  # type: ignore[call-overload]  # equals a Gemm
    if chosen is None:
        if len(_plans) >= REMEMBERED:
            _plans.clear()
        problem = Gemm(*sizes)
        chosen = _plans[problem] = measured(problem) or plan(*sizes[:-2], capability)
    return chosen


def measured(problem: Gemm) -> Tiling | None:
    """The plan in the table; None if there is none or it is invalid."""
    entry = (TABLE.get(name(problem)) or {}).get("choice")
    if not isinstance(entry, dict) or set(entry) != set(Tiling._fields) or entry["method"] not in METHODS:
        return None
    if not all(type(entry[k]) is int and 1 <= entry[k] <= most for k, most in MOST.items()):
        return None
    few = problem.kind == "fprop" and problem.width <= FEW_TOKENS and problem.cols > 0
    return Tiling(**entry) if few or entry["method"] != "few" else None


def name(problem: Gemm) -> str:
    """The key of a GEMM in the table; tokens are the columns of the dense operand, in wgrad those of the compressed one."""
    kind, dtype, rows, cols, width, n, m = problem[:7]
    fixed, tokens = (width, cols) if kind == "wgrad" else (cols, width)
    return key("triton", problem.device, f"{kind}|{str(dtype).removeprefix('torch.')}|{n}:{m}|{rows}x{fixed}", tokens)


def words(p: Tiling) -> str:
    """A plan as text: its method and the numbers that the method uses."""
    numbers = {} if p.method == "scratch" else {k: v for k, v in p._asdict().items() if k != "method"}
    return " ".join([p.method, *(f"{k}={v}" for k, v in numbers.items())])


@torch.no_grad()
def search(op: str, *args: Any, timer: Seconds | None = None) -> Measurement:
    """Find the fastest correct plan for a raw op's call, and use it from now on; the values of the arguments do not matter."""
    kind = KINDS[op]
    (values, _, n, m, cols), other = (args[:5], args[5]) if kind == "wgrad" else (args[1:6], args[0])
    width = other.shape[1] if kind == "wgrad" else other.numel() // other.shape[-1]
    sizes = (kind, other.dtype, values.shape[0], cols, width, n, m)
    capability = capability_of(other)
    problem, fn = Gemm(*sizes, other.device, capability), next(i.fn for i in implementations(op) if i.backend == NAME)
    operands, validator = _operands(problem)

    def run(p: Tiling, operands: tuple[Any, ...], out: Tensor | None = None) -> object:
        _plans[problem] = p
        return fn(*operands, out=out)

    sets: list[tuple[Any, ...]] = []  # made after all checks, and shared by the plans that passed

    def calls(p: Tiling) -> list[Callable[[], object]]:
        if not sets:
            sets.extend(cold(operands))
        return [partial(run, p, some) for some in sets]

    plans = {words(p): p for p in candidates(*sizes, capability)}
    some = [Candidate(text, lambda out, p=p: run(p, operands, out), partial(calls, p)) for text, p in plans.items()]  # type: ignore[misc]
    try:
        measurement = measure(name(problem), some, validator, Timer(other.device, timer))
    finally:
        _plans.clear()
    better = measurement.seconds and measurement.best != measurement.baseline
    measurement.store(plans[measurement.best]._asdict() if better else None)
    return measurement


def _operands(problem: Gemm) -> tuple[tuple[Any, ...], Validator]:
    """Random arguments of the op, and the validator of its result."""
    kind, dtype, rows, cols, width, n, m, device, _ = problem
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
