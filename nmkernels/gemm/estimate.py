"""How long each method of doing a GEMM takes: an estimate from constants, so that the same machine always chooses the same method.

On a CPU the constants are fitted to measured rows (``rates.json``, written by ``python -m bench.fit_rates``), one line for each kind of
machine, dtype, role and kernel. A line is linear in its constants::

    seconds = call + elements · (a(tokens) + b(tokens) · N/M) + large · (c + d · N/M) + tokens · (e · cols + f · rows) + g · mapped

``elements`` is rows · cols; ``a`` and ``b`` are straight lines between the token counts that were measured; ``large`` are the elements
beyond a million, which lie in memory and not in a cache; ``mapped`` those of a result so large that its pages are new each time. A kind
that lacks a line borrows that of the nearest one. On a GPU nothing has been measured yet: the estimate is a roofline of the table in
``gemm/devices.py``.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache, lru_cache
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import capability
from ..pattern import BackendError, Pattern
from .devices import DEVICES, Device, named
from .problem import Problem, plain

DENSE, SPARSE, EXPAND, FLOAT32 = "dense", "sparse", "expand", "expand float32"
METHODS = (DENSE, SPARSE, EXPAND, FLOAT32)
"""torch's GEMM of the dense layout; the kernel on the compressed form; torch's GEMM after decompressing, and the same in float32."""

MEASURED, BORROWED = 1.06, 1.25
"""A method is taken instead of dense if its estimate is so many times as fast: near a tie the fit errs by the first."""

ISAS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")
"""The instruction sets of the CPU kernels, each of which has all of those before it."""

CACHED = 1 << 20
"""Elements of a weight that caches hold."""
MAPPED = 32 << 20
"""Bytes from which on malloc takes fresh pages from the system for every result."""


class Line(NamedTuple):
    """The constants of one method. ``ns``: by ``features``, in nanoseconds; ``low``, ``high``: the densities that were measured."""

    tokens: tuple[int, ...]
    ns: tuple[float, ...]
    low: float
    high: float
    rows: int

    def seconds(self, p: Problem) -> float:
        """The estimate."""
        return 1e-9 * sum(map(mul, self.ns, features(self.tokens, p)))


def features(knots: Sequence[int], p: Problem) -> list[float]:
    """What the constants of a line are multiplied with; those that depend on the density come last, and dense has no constants for them."""
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
    return [1.0, *a, large, tokens * cols, tokens * rows, mapped, *(density * x for x in a), density * large]


# ---- which machine, which kernel, which line


@lru_cache(maxsize=64)
def machine(device: torch.device) -> str:
    """The kind of machine that constants belong to: ``"amx intel 6"`` (instruction set, vendor, family), ``"sm_90"``."""
    if device.type == "cpu":
        try:
            isa = capability.instruction_set()
        except ValueError as error:
            raise BackendError(f"The CPU kernels cannot run as asked: {error}.") from None
        return f"{isa} {capability.processor()}".strip() if isa in ISAS[1:] else isa
    if device.type == "cuda":
        return "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return device.type


@lru_cache(maxsize=64)
def _gpu(device: torch.device) -> Device | None:
    return named(torch.cuda.get_device_name(device))


def kernel(p: Problem, kind: str = "") -> str:
    """What the CPU kernels of a kind of machine do with the compressed operand.

    ``"stored"``: multiply what is stored, in float32, of patterns without vector instructions for one token ``"stored by element"``;
    ``"pairs"``: the same in bfloat16, two at a time; ``"expanded in cache"``: expand blocks of it there for the dense bfloat16
    instructions, of such patterns ``"expanded by element"``.
    """
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
"""Patterns that vector instructions expand."""
FEW = 64
"""Tokens up to which dgrad in bfloat16 expands even 1:8."""


@cache
def rates() -> dict[str, dict[str, Line]]:
    """The lines of each kind of machine, by dtype, role and what was measured: ``"bfloat16 fprop pairs"``."""
    text = json.loads(Path(__file__).with_name("rates.json").read_text(encoding="utf-8"))
    return {kind: {name: Line(*map(_tuple, line)) for name, line in lines.items()} for kind, lines in text.items()}


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@lru_cache(maxsize=256)
def nearest(kind: str) -> tuple[str, ...]:
    """The kinds that have lines, nearest first: itself, the same instruction set and vendor, the same set, the next lower ones, others."""
    isa, _, processor = kind.partition(" ")
    if isa not in ISAS[1:]:
        return ()

    def distance(other: str) -> tuple[bool, int, bool, bool, str]:
        theirs, _, of = other.partition(" ")
        steps, vendors = ISAS.index(isa) - ISAS.index(theirs), (of.partition(" ")[0], processor.partition(" ")[0])
        return steps < 0, abs(steps), of != processor, vendors[0] != vendors[1], other

    return tuple(sorted(rates(), key=distance))


def line(p: Problem, method: str) -> tuple[str, Line] | None:
    """The line of a method, and the kind of machine that it is of: this one, or the nearest that has one; None where none has."""
    start = f"{plain(p.dtype)} {p.role} "
    for kind in nearest(machine(p.device)):
        found = rates()[kind].get(start + (kernel(p, kind) if method == SPARSE else method))
        if found is not None:
            return kind, found
    return None


def _as_run(p: Problem, method: str) -> Problem:
    """``p`` as the sparse kernel sees it: dgrad from Wᵀ compressed along its rows is the fprop of Wᵀ."""
    if method == SPARSE and p.role == "dgrad" and any(form.startswith("columns") for form in p.forms):
        return p._replace(role="fprop", rows=p.cols, cols=p.rows)
    return p


# ---- the estimate


def seconds(method: str, p: Problem) -> float:
    """The estimate for one of ``METHODS``, without making W̃; in wgrad with making ĝ. Infinite where nothing is known of the method."""
    if p.device.type == "cuda":
        return _on_gpu(method, p)
    found = line(_as_run(p, method), method)
    if found is None:
        return {DENSE: 0.0, EXPAND: 1.0}.get(method, math.inf)
    made = making("dense" if method == DENSE else "packed", p) if p.role == "wgrad" else 0.0
    return _scale(p, found[0]) * found[1].seconds(_as_run(p, method)) + made


def _scale(p: Problem, lender: str) -> float:
    """How many times as long dense takes here as on the kind of machine whose line is borrowed, by their fprop of a large weight."""
    if lender == machine(p.device):
        return 1.0
    large = p._replace(role="fprop", rows=4096, cols=4096)
    own, theirs = (rates().get(kind, {}).get(f"{plain(p.dtype)} fprop {DENSE}") for kind in (machine(p.device), lender))
    return own.seconds(large) / theirs.seconds(large) if own and theirs else 1.0


def making(form: str, p: Problem) -> float:
    """Seconds of making W̃ from W, in dense layout (``form`` "dense") or compressed ("packed"); in wgrad of making ĝ from g."""
    weight = of_making(p)
    if p.device.type == "cuda":
        gpu, size = _gpu(p.device) or DEVICES["A100"], p.dtype.itemsize
        written = size if form == DENSE else _packed_bytes(p)
        return gpu.call + weight.rows * weight.cols * (size + written) / (gpu.passes * gpu.bandwidth)
    found = line(p if p.role == "wgrad" else weight, f"make {form}")
    return found[1].seconds(weight) if found else 0.0


def of_making(p: Problem) -> Problem:
    """What is made for ``p``, as a problem of one token: W̃ ``(rows, cols)``, in wgrad ĝᵀ ``(rows, tokens)``."""
    return p._replace(role="fprop", tokens=1, cols=p.tokens if p.role == "wgrad" else p.cols)


def known(p: Problem) -> bool:
    """Whether this kind of machine has rows of dense and of the sparse kernel for the dtype and role, and at this density."""
    dense, sparse = line(p, DENSE), line(_as_run(p, SPARSE), SPARSE)
    return bool(dense and sparse and dense[0] == sparse[0] == machine(p.device) and sparse[1].low <= p.n / p.m <= sparse[1].high)


def margin(method: str, p: Problem) -> float:
    """What the estimate of a method is multiplied with before it is compared: 1 for dense, more for what is less certain."""
    if method == DENSE:
        return 1.0
    if p.device.type == "cuda":
        return BORROWED if _gpu(p.device) or DENSE not in p.forms else math.inf
    return MEASURED if known(p) else BORROWED


def forget() -> None:
    """Look at the machine again."""
    for memo in (machine, _gpu, nearest):
        memo.cache_clear()


# ---- GPUs


def _packed_bytes(p: Problem) -> float:
    """Of the compressed form, per element of the dense one."""
    return p.n / p.m * (p.dtype.itemsize + Pattern(p.n, p.m).index_bits / 8)


def _on_gpu(method: str, p: Problem) -> float:
    """The roofline: the longer of the bytes and the arithmetic."""
    gpu, size = _gpu(p.device) or DEVICES["A100"], p.dtype.itemsize
    elements, others = p.rows * p.cols, p.tokens * (p.rows + p.cols) * size
    speed, arithmetic = gpu.share * gpu.bandwidth, 2.0 * p.tokens * elements / gpu.rate(p.dtype)
    if method == SPARSE:
        if (p.n, p.m) == (2, 4) and size == 2 and any(":" in form for form in p.forms):
            arithmetic /= gpu.ratio[p.role]
        return gpu.call + max((elements * _packed_bytes(p) + others) / speed, arithmetic)
    expanding = 0.0 if method == DENSE else gpu.call + elements * (_packed_bytes(p) + size) / speed
    if method == FLOAT32:
        arithmetic *= gpu.rate(p.dtype) / gpu.rate(torch.float32)
    return expanding + gpu.launch + max((elements * size + others) / speed, arithmetic)
