"""How a CPU does a GEMM with a compressed operand: by the sparse kernel, or by expanding the operand for torch's dense GEMM.

Which is faster depends on the machine. It is looked up in the table, measured at the first call of a shape, or where nothing may be
measured predicted by a roofline.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import capability
from ...pattern import Pattern
from ...tuning import BUDGET, TABLE, Found, Seconds, Timer, cold, key
from ...tuning.setting import reproducible, setting, undisturbed

SPARSE, EXPAND, FLOAT32 = "sparse", "expand", "expand to float32"
"""The kernel on the compressed form; torch's GEMM of the expanded operand; the same in float32, of 16-bit operands."""
DENSE = "dense"
"""torch's GEMM of a dense operand that is at hand; only predicted here."""

FIRST_USE_BUDGET, LARGEST = 0.02, 1 << 34
"""Seconds of timing on first use, unless one round takes longer; and the most multiplications: 0.2 s of a dense GEMM on two cores."""

REMEMBERED = 4096
"""Problems whose way is remembered; then all are looked up again."""

log = logging.getLogger("nmkernels.choice")
CPU = torch.device("cpu")


class Problem(NamedTuple):
    """A GEMM of a compressed matrix ``(rows, cols)`` with a dense one; ``width``: tokens, or in wgrad the layer's inputs."""

    role: str
    dtype: torch.dtype
    rows: int
    cols: int
    width: int
    n: int
    m: int

    def ways(self) -> tuple[str, ...]:
        """The ways in which it can be done, the one that needs no memory first."""
        return (SPARSE, EXPAND) if self.dtype == torch.float32 else (SPARSE, EXPAND, FLOAT32)

    def line(self) -> str:
        """Its line of the table, the same for as many tokens up to the next power of two."""
        tokens, shape = (self.cols, (self.rows, self.width)) if self.role == "wgrad" else (self.width, (self.rows, self.cols))
        dtype = str(self.dtype).removeprefix("torch.")
        return key("cpu", CPU, f"{self.role}|{dtype}|{self.n}:{self.m}|{shape[0]}x{shape[1]}", tokens)


# ---- the heuristic: a roofline of one thread, of which only ratios matter

FLOPS = {"portable": 1e10, "avx2": 1e11, "avx512": 2e11}
"""Per second in float32: two FMAs of a vector's width in each cycle of 3 GHz."""
SPARSE_SHARE = 0.6
"""Of a dense GEMM's rate: on AMD's cores and Intel's alike, an FMA that loads an operand from L1 takes so much longer."""
BANDWIDTH = 2e10
"""Bytes per second, of memory or a shared cache."""
CALL = 5e-6
"""Seconds that a call on the compressed form takes beside that."""
NATIVE_16_BIT, EMULATED_16_BIT = {"amx_tile": 6.0, "avx512_bf16": 1.0}, 0.2
"""torch's GEMM in 16 bits relative to float32: with instructions for it, and without (0.12 in bfloat16, 0.3 in float16 on a Zen 3)."""

EXPANDED = {"avx512_bf16": {(2, 4), (1, 4), (2, 8), (1, 8), (4, 8)}, "amx": None}
"""What bfloat16 kernels expand inside the cache, by instruction set; None: every pattern. It saves bytes, and no arithmetic."""
PAIRED, PAIRED_SHARE = {(2, 4), (1, 4), (2, 8), (1, 8)}, 0.5
"""What AVX512-BF16 multiplies as stored, in pairs, in fprop and wgrad; and its share of a dense GEMM's rate."""


def _instructions() -> dict[str, bool]:
    """The instruction sets that torch's GEMMs may use, by the names of ``NATIVE_16_BIT``."""
    known: Any = getattr(torch.cpu, "get_capabilities", None)
    if known is not None:
        return dict(known())
    old: Any = torch.cpu  # before 2.11
    return {"amx_tile": old._is_amx_tile_supported(), "avx512_bf16": old._is_avx512_bf16_supported()}


def seconds(way: str, p: Problem) -> float:
    """What ``p`` takes one thread, ``way`` being ``DENSE`` too: the longer of its arithmetic and its memory traffic."""
    size, index = p.dtype.itemsize, Pattern(p.n, p.m).index_bits / 8
    dense, packed = p.rows * p.cols * size, p.rows * p.cols * p.n / p.m * (size + index)
    others, flops = p.width * (p.rows + p.cols) * size, 2.0 * p.rows * p.cols * p.width
    theirs = FLOPS["avx512" if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else "avx2"]
    instructions = _instructions()
    in_16_bits = next((rate for name, rate in NATIVE_16_BIT.items() if instructions.get(name)), EMULATED_16_BIT)
    if way == SPARSE:
        isa = capability.instruction_set()
        work, rate = flops * p.n / p.m, SPARSE_SHARE * FLOPS.get(isa.partition("_")[0], theirs)
        if p.dtype == torch.bfloat16 and isa in EXPANDED:
            pattern, expanded = (p.n, p.m), EXPANDED[isa]
            if isa == "avx512_bf16" and p.role != "dgrad" and pattern in PAIRED:
                rate = PAIRED_SHARE * theirs * in_16_bits
            elif expanded is None or pattern in expanded:
                work, rate = flops, theirs * in_16_bits
        return CALL + max(work / rate, (packed + others) / BANDWIDTH)
    prepared = 0.0 if way == DENSE else CALL + (packed + dense) / BANDWIDTH
    if way == FLOAT32:
        dense, others, size = 2 * dense, 2 * others, 4
        prepared += (dense + others) / BANDWIDTH
    elif size == 2:
        theirs *= in_16_bits
    return prepared + max(flops / theirs, (dense + others) / BANDWIDTH)


def rule(p: Problem) -> str:
    """The way that the roofline finds fastest."""
    return min(p.ways(), key=lambda way: seconds(way, p))


# ---- the choice

_known: dict[tuple[Problem, int, bool], str] = {}
_measuring = threading.RLock()
_revision = -1


class Gemm(NamedTuple):
    """An op that is done in the fastest way.

    ``sparse(*args, out=None)`` is its kernel, ``expanded(dtype, *args)`` torch's GEMM in that dtype, ``problem(*args)`` what they do.
    """

    sparse: Callable[..., Tensor]
    expanded: Callable[..., Tensor]
    problem: Callable[..., Problem]

    def __call__(self, *args: Any, out: Tensor | None = None) -> Tensor:
        p = self.problem(*args)
        return self.by(way(p, self, args), p.dtype, *args, out=out)

    def each(self) -> tuple[Callable[..., Tensor], ...]:
        """Every way as a function of its own."""

        def one(way: str, *args: Any, out: Tensor | None = None) -> Tensor:
            return self.by(way, self.problem(*args).dtype, *args, out=out)

        return tuple(partial(one, way) for way in (SPARSE, EXPAND, FLOAT32))

    def by(self, way: str, dtype: torch.dtype, *args: Any, out: Tensor | None = None) -> Tensor:
        """The call by that way."""
        if way == SPARSE:
            return self.sparse(*args, out=out)
        result = self.expanded(torch.float32 if way == FLOAT32 else dtype, *args)
        return result.contiguous() if out is None else out.copy_(result)


def way(p: Problem, gemm: Gemm, args: tuple[Any, ...]) -> str:
    """How to do ``p``, which is the call ``gemm(*args)``. After the first time it is a lookup in a dict."""
    global _revision
    if _revision != TABLE.revision or len(_known) >= REMEMBERED:
        _known.clear()
        _revision = TABLE.revision
    asked = p, torch.get_num_threads(), torch._C._get_deterministic_algorithms()
    found = _known.get(asked)
    if found is None:
        found = _known[asked] = _find(p, gemm, args)
    return found


def _find(p: Problem, gemm: Gemm, args: tuple[Any, ...]) -> str:
    work = p.rows * p.cols * p.width
    if not work or reproducible():
        return rule(p)
    found = _from_table(p)
    if found is None and setting() in ("", "measured") and work <= LARGEST and undisturbed(CPU):
        with _measuring:  # another thread may have come first
            found = _from_table(p) or search(p, gemm, args, FIRST_USE_BUDGET, "first use").best
    return found or rule(p)


def _from_table(p: Problem) -> str | None:
    line = TABLE.get(p.line())
    found = None if line is None else line.get("choice")
    return found if found in p.ways() else None


def search(
    p: Problem, gemm: Gemm, args: tuple[Any, ...], budget: float = BUDGET, by: str = "nm.tune", timer: Seconds | None = None
) -> Found:
    """Time the ways of doing ``p`` on these operands, and follow the fastest from now on."""
    found, sets = Found(p.line(), rule(p)), cold(args)
    calls = {name: [partial(gemm.by, name, p.dtype, *some) for some in sets] for name in p.ways()}
    found.seconds, found.refused = Timer(CPU, timer).compare(calls, budget)
    if found.seconds:
        found.store({found.problem: found.line(found.best, by)})
    log.info("%s: %s", found.problem, found.best)
    return found


def prepare(gemm: Gemm, op: str, *args: Any, timer: Seconds | None = None) -> Found:
    """``search`` for an op's arguments, for ``nm.tune``."""
    return search(gemm.problem(*args), gemm, args, timer=timer)
