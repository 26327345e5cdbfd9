"""Estimate how long each method of a GEMM takes, from constants, so that the same machine always chooses the same method.

On a CPU the constants are fitted to measurements (``rates.json``, written by ``python -m bench.fit_rates``), one line for each kind of
machine, dtype, role and kernel. A line is linear in its constants::

    seconds = call + elements · (a(tokens) + b(tokens) · N/M) + large · (c + d · N/M) + tokens · (e · cols + f · rows) + g · mapped

``elements`` is rows · cols; ``a`` and ``b`` are piecewise linear between the measured token counts; ``large`` counts the elements beyond a
million, which are in memory and not in a cache; ``mapped`` those of a result so large that its pages are newly mapped at every call.

A kind of machine that lacks a line borrows it from the nearest kind, and then only as a ratio: a method takes so many times as long as
torch's dense GEMM does here, as it does at the lender. Expanding the weight for torch's GEMM takes at least as long as that GEMM does here,
in the dtype in which it multiplies, and the lender's time to expand in addition.

GPUs have no lines: there the estimate is a roofline from ``gemm/devices.py``, whose numbers for an H100 are measured.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache, lru_cache
from operator import mul
from pathlib import Path
from typing import NamedTuple

import torch

from .. import capability
from ..backends.cpu.integers import BY_DIGITS
from ..pattern import BackendError, Pattern
from .devices import DEVICES, Device, named
from .problem import Problem, packed_bytes

DENSE, SPARSE, EXPAND, FLOAT32 = "dense", "sparse", "expand", "expand float32"
"""torch's GEMM in dense layout; the kernel on the compressed form; torch's GEMM after decompressing, and the same in float32."""

MEASURED, BORROWED = 1.06, 1.25
"""A method replaces dense only if it is estimated to be faster by this factor, with constants of this kind of machine or borrowed ones;
borrowed, it also needs the latter to replace the sparse kernel."""

CACHED_FEW, CACHED_MANY = 1.8, 1.5
"""The same for a weight that stays in the cache, for up to 4 tokens and for more, on a kind of machine whose rows are all of weights in
memory: the cache makes dense faster by 1.3 to 2.2 times as much (Xeon with AMX, 2026-11-26)."""

ISAS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")
"""The instruction sets of the CPU kernels; each includes all before it."""

CACHED = 1 << 20
"""Elements of a weight that fit in cache."""
MAPPED = 32 << 20
"""Size in bytes above which malloc maps fresh pages for every result."""


class Line(NamedTuple):
    """The constants ``ns`` of one method, in nanoseconds, ordered as ``features``; ``low`` and ``high`` bound the measured densities.

    Of weights with fewer than ``least`` elements it says nothing: what a call costs apart from them is not known from much larger ones.
    """

    tokens: tuple[int, ...]
    ns: tuple[float, ...]
    low: float
    high: float
    rows: int
    least: int

    def seconds(self, p: Problem) -> float:
        """The estimate."""
        return 1e-9 * sum(map(mul, self.ns, features(self.tokens, p)))


def features(knots: Sequence[int], p: Problem) -> list[float]:
    """The factors of a line's constants; those that depend on density come last, and dense lines have no constants for them."""
    tokens, rows, cols, density, elements = p.tokens, p.rows, p.cols, p.n / p.m, p.rows * p.cols
    result = elements if p.role == "wgrad" else tokens * (rows if p.role == "fprop" else cols)
    hats = [0.0] * len(knots)
    i = bisect_right(knots, tokens) - 1
    if i < 0:
        hats[0] = 1.0
    elif i == len(knots) - 1:
        hats[i] = tokens / knots[i]
    else:
        share = (tokens - knots[i]) / (knots[i + 1] - knots[i])
        hats[i], hats[i + 1] = 1 - share, share
    large = max(0, elements - CACHED)
    a = [elements * hat for hat in hats]
    mapped = result if result * p.dtype.itemsize >= MAPPED else 0
    return [1.0, *a, large, tokens * cols, tokens * rows, mapped, *[density * x for x in a], density * large]


# ---- which machine, which kernel, which line


@lru_cache(maxsize=64)
def machine(device: torch.device) -> str:
    """The kind of machine that constants belong to: ``"amx intel 6"`` (instruction set, vendor, family), ``"sm_90"``."""
    if device.type == "cpu":
        try:
            isa = capability.instruction_set()
        except ValueError as error:
            raise BackendError(f"The CPU kernels cannot run: {error}.") from None
        return f"{isa} {capability.processor()}".strip() if isa in ISAS[1:] else isa
    if device.type == "cuda":
        return "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return device.type


@lru_cache(maxsize=64)
def _gpu(device: torch.device) -> Device | None:
    return named(torch.cuda.get_device_name(device))


def kernel(p: Problem, kind: str = "") -> str:
    """How the CPU kernels of a kind of machine (by default this one) multiply the compressed operand.

    ``"stored"``: stored values in float32, or ``"stored by element"`` for one token and a pattern without vector instructions; ``"pairs"``:
    stored values in bfloat16, two at a time; ``"expanded in cache"``: blocks are expanded in cache for the dense bfloat16 instructions, or
    ``"expanded by element"`` for a pattern without vector instructions; ``"integers"``, or again ``"integers by element"``.
    """
    if p.values != "float":
        return "integers" if (p.n, p.m) in BY_DIGITS else "integers by element"
    isa = (kind or machine(p.device)).partition(" ")[0]
    pattern, sparse = (p.n, p.m), 8 * p.n <= p.m
    vectorized, brain = pattern in VECTORIZED, p.dtype == torch.bfloat16 and isa in ("avx512_bf16", "amx")
    if p.role == "fprop" and p.tokens == 1 and (not brain or not vectorized or sparse):
        return "stored" if vectorized or pattern in ((1, 16), (1, 32)) else "stored by element"
    if not brain:
        return "stored"
    if isa == "amx":
        return "expanded in cache" if vectorized else "expanded by element"
    if not vectorized or (p.role == "dgrad" and sparse and p.tokens > FEW):
        return "stored"
    return "expanded in cache" if p.role == "dgrad" or pattern == (4, 8) else "pairs"


VECTORIZED = {(2, 4), (1, 4), (2, 8), (1, 8), (4, 8)}
"""Patterns that are expanded by vector instructions."""
FEW = 64
"""The most tokens for which dgrad in bfloat16 expands even 1:8."""


@cache
def rates() -> dict[str, dict[str, Line]]:
    """The lines of each kind of machine by name, see ``named_line``."""
    text = json.loads(Path(__file__).with_name("rates.json").read_text(encoding="utf-8"))
    return {
        kind: {name: Line(tuple(tokens), tuple(ns), *rest) for name, (tokens, ns, *rest) in lines.items()} for kind, lines in text.items()
    }


@lru_cache(maxsize=256)
def nearest(kind: str) -> tuple[str, ...]:
    """The kinds of machines with lines, nearest first: itself, same instruction set and vendor, same set, lower sets, others."""
    isa, _, processor = kind.partition(" ")
    if isa not in ISAS[1:]:
        return ()

    vendor, ranked = processor.partition(" ")[0], []
    for other in rates():
        theirs, _, of = other.partition(" ")
        steps = ISAS.index(isa) - ISAS.index(theirs)
        ranked.append((steps < 0, abs(steps), of != processor, of.partition(" ")[0] != vendor, other))
    return tuple([other for *_, other in sorted(ranked)])


def named_line(p: Problem, what: str) -> str:
    """The name of a line: ``"bfloat16 fprop pairs"``, of integers ``"bfloat16 fprop expand int8"``, of a weight that stays in the cache
    ``"bfloat16 fprop dense cached"``. Integers have a line of dense too, so that what is compared was measured together."""
    integers = f" {p.values}" if p.values != "float" else ""
    return f"{str(p.dtype).removeprefix('torch.')} {p.role} {what}{integers}{' cached' if p.cached else ''}"


def line_of(kind: str, p: Problem, method: str) -> Line | None:
    """The line of a method that a kind of machine has itself, for weights of this size."""
    constants = rates().get(kind, {}).get(named_line(p, kernel(p, kind) if method == SPARSE else method))
    return constants if constants and p.rows * p.cols >= constants.least else None


def line(p: Problem, method: str) -> tuple[str, Line] | None:
    """The line of a method and the kind of machine that it comes from: this one, or the nearest that has one; None if none has."""
    for kind in nearest(machine(p.device)):
        constants = line_of(kind, p, method)
        if constants is not None:
            return kind, constants
    return None


def _as_run(p: Problem, method: str) -> Problem:
    """``p`` as the sparse kernel runs it: dgrad from a packed Wᵀ is the fprop of Wᵀ."""
    if method == SPARSE and p.role == "dgrad" and any(form.startswith("columns") for form in p.forms):
        return p._replace(role="fprop", rows=p.cols, cols=p.rows)
    return p


def _as_known(p: Problem, method: str) -> Problem:
    """``p`` as there are lines of it: as if its weight were in memory, where this kind of machine has lines of such weights and no line of
    cached ones, or none has."""
    run, local = _as_run(p, method), machine(p.device)
    if not p.cached or line_of(local, run, method) is not None:
        return p
    return p._replace(cached=False) if line_of(local, run._replace(cached=False), method) or line(run, method) is None else p


# ---- the estimate


def seconds(method: str, p: Problem) -> float:
    """The estimate for one of the four methods, without the time to make W̃, but in wgrad with ĝ; infinite if the method has no line."""
    if p.device.type == "cuda":
        return _on_gpu(method, p)
    if not p.tokens:  # nothing is multiplied, and no share of nothing can be borrowed
        return 0.0
    p = _as_known(p, method)
    if method == DENSE:
        return _dense(p)
    run = _as_run(p, method)
    nearest_line = line(run, method)
    if nearest_line is None:
        return 1.0 if method == EXPAND else math.inf
    kind, constants = nearest_line
    taken = constants.seconds(run) + _drawing(kind, SPARSE, p)
    if kind == machine(p.device):
        return taken
    dense = line_of(kind, p, DENSE)
    if dense is None:
        return math.inf
    borrowed = _dense(p) * taken / (dense.seconds(p) + _drawing(kind, DENSE, p))
    if method == SPARSE:
        return borrowed
    # torch's GEMM here, in the dtype in which it multiplies, and expanding at the lender, where both take ``taken``
    gemm = p._replace(dtype=torch.float32) if method == FLOAT32 else p
    multiplying = line_of(kind, gemm, DENSE)
    return max(borrowed, _dense(gemm) + max(0.0, taken - multiplying.seconds(gemm) if multiplying else 0.0))


def _dense(p: Problem) -> float:
    """Seconds of torch's GEMM; where a role has no line here, it differs from the lender's time as fprop of a large weight does."""
    nearest_line = line(p, DENSE)
    if nearest_line is None:
        return 0.0
    kind, constants = nearest_line
    taken, local = constants.seconds(p) + _drawing(kind, DENSE, p), machine(p.device)
    if kind == local:
        return taken
    fprop = p._replace(role="fprop", rows=4096, cols=4096, cached=False, values="float", group=0)
    ours, theirs = line_of(local, fprop, DENSE), line_of(kind, fprop, DENSE)
    return taken * ours.seconds(fprop) / theirs.seconds(fprop) if ours and theirs else taken


def _drawing(kind: str, method: str, p: Problem) -> float:
    """Seconds to draw the estimate ĝ of wgrad, on a kind of machine that has such a line; 0 for other roles."""
    drawing = line_of(kind, p, f"make {DENSE if method == DENSE else 'packed'}") if p.role == "wgrad" else None
    return drawing.seconds(of_making(p)) if drawing else 0.0


def making(form: str, p: Problem) -> float:
    """Seconds to make W̃ from W, on a GPU also to draw ĝ for wgrad, in dense layout (``form`` "dense") or compressed ("packed")."""
    weight = of_making(p)
    if p.device.type == "cuda":
        gpu = _gpu(p.device) or DEVICES["A100"]
        share = gpu.estimate if p.role == "wgrad" else gpu.passes
        return copying(gpu, weight.rows * weight.cols, p.dtype.itemsize + _written(form, p), share)
    making_line = line(weight, f"make {form}")
    return making_line[1].seconds(weight) if making_line else 0.0


def of_making(p: Problem) -> Problem:
    """The size of what is made for ``p``, as a problem of one token: W̃ ``(rows, cols)``, in wgrad ĝᵀ ``(rows, tokens)``."""
    return p._replace(role="fprop", tokens=1, cols=p.tokens if p.role == "wgrad" else p.cols)


def measured(p: Problem, method: str = SPARSE) -> bool:
    """Whether dense and the method were measured on this kind of machine, in this dtype and role and at such densities."""
    p, local = _as_known(p, method), machine(p.device)
    constants = line_of(local, _as_run(p, method), method)
    return bool(constants and line_of(local, p, DENSE) and constants.low <= p.n / p.m <= constants.high)


def margin(method: str, p: Problem) -> float:
    """The factor on a method's estimate before it is compared: more the less certain the estimate is, and 1 for the baseline, which is
    dense, or the sparse kernel without a dense layout. There, methods that were measured are equals."""
    if method == (DENSE if DENSE in p.forms else SPARSE):
        return 1.0
    if p.device.type == "cuda":
        return BORROWED if _gpu(p.device) or DENSE not in p.forms else math.inf
    if p.cached and DENSE in p.forms and not _as_known(p, method).cached:
        return CACHED_FEW if p.tokens <= 4 else CACHED_MANY
    return BORROWED if not measured(p, method) else MEASURED if DENSE in p.forms else 1.0


def forget() -> None:
    """Detect the machine again."""
    for memo in (machine, _gpu, nearest):
        memo.cache_clear()


# ---- GPUs


def roofline(gpu: Device, p: Problem, stored: float | None = None, ratio: float = 1.0) -> float:
    """Seconds of a GEMM: of its bytes or its arithmetic, whichever takes longer, and of starting a kernel.

    Args:
        stored: bytes per element of the dense form in which the N:M operand is read; None if it is dense.
        ratio: the speed-up of its arithmetic over dense.
    """
    size, elements = p.dtype.itemsize, p.rows * p.cols
    moved: float = size * (elements + p.tokens * (p.rows + p.cols))
    if stored is not None:
        moved -= (p.tokens * p.rows if p.role == "wgrad" else elements) * (size - stored)
    arithmetic = 2.0 * p.tokens * elements / (gpu.rate(p.dtype) * ratio)
    return max(moved / (gpu.share * gpu.bandwidth), arithmetic) + (gpu.launch if stored is None else gpu.call)


def copying(gpu: Device, elements: int, each: float, share: float) -> float:
    """Seconds of a kernel that reads and writes ``each`` bytes per element, at a share of the bandwidth."""
    return gpu.call + elements * each / (share * gpu.bandwidth)


def _written(form: str, p: Problem) -> float:
    """Bytes of a form per element of the dense one."""
    return p.dtype.itemsize if form == DENSE else packed_bytes(Pattern(p.n, p.m), p.dtype, p.values, p.group)


def _on_gpu(method: str, p: Problem) -> float:
    """The estimate; in wgrad without drawing the estimate of the gradient."""
    gpu, size, packed = _gpu(p.device) or DEVICES["A100"], p.dtype.itemsize, _written("packed", p)
    if method == SPARSE:
        cores = (p.n, p.m) == (2, 4) and size == 2 and any(":" in form for form in p.forms)
        return roofline(gpu, p, packed, gpu.ratio[p.role] if cores else 1.0)
    if method == DENSE:
        return roofline(gpu, p)
    expanding = copying(gpu, p.rows * p.cols, packed + size, gpu.share)
    if p.integers:  # decoded values are written, and read again to expand them
        expanding += copying(gpu, p.rows * p.cols, 2 * size * p.n / p.m, gpu.share)
    slower = gpu.rate(p.dtype) / gpu.rate(torch.float32) if method == FLOAT32 else 1.0
    return expanding + roofline(gpu, p, ratio=1 / slower)
