"""What can be timed, and what it must reach: families, each of which turns a ``Spec`` into the calls that take turns, and targets.

A family is one function in ``bench/cases/``::

    @family("nm_mask", grid=Grid(matrices=("4096x11008",), patterns=("2:4",)))
    def mask(spec: Spec, device: str) -> Work: ...

Nothing is allocated before ``Family.build`` is called, so that every case there is can be listed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from nmkernels import NMError, Pattern

Call = Callable[[], object]

CPU = "nmkernels cpu"

SHARE, ALLOWED = "share of roofline", "x roofline allows"
"""Metrics of a GEMM: the share that it reaches of what bytes and FMAs allow, and how many times as fast as dense they allow it to be."""

FASTEST = "x fastest dense"
"""Times as fast as the fastest of torch's ways on a CPU with the weight as it is."""

AMX = "has AMX"
"""1 or 0, a fact beside rows whose bounds depend on it."""

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Spec:
    """One case: the op, its pattern and dtype, a weight of ``rows`` x ``cols``, tokens (0 where there are none), or a whole model."""

    op: str
    pattern: str = "2:4"
    dtype: str = "float32"
    rows: int = 0
    cols: int = 0
    tokens: int = 0
    model: str = ""

    @property
    def shape(self) -> str:
        """The shape as rows of the CSV name it: ``4096x11008``, ``16x4096x4096`` (tokens first), ``2048 tokens, GPT 1024x2``."""
        if self.model:
            return f"{self.tokens} tokens, {self.model}"
        return "x".join(str(size) for size in (self.tokens, self.rows, self.cols) if size)

    @property
    def n(self) -> int:
        """Elements kept of each group."""
        return Pattern(self.pattern).n

    @property
    def m(self) -> int:
        """Elements in each group."""
        return Pattern(self.pattern).m

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's object."""
        return DTYPES[self.dtype]

    def __str__(self) -> str:
        return " ".join(part for part in (self.op, self.pattern, self.dtype, self.shape) if part)


@dataclass
class Provider:
    """One way to do the work of a case.

    Args:
        name: as the CSV shows it; ours start with ``nmkernels``.
        call: one unit of work.
        bytes: memory that one call has to read and write at least.
        flops: floating-point operations that one call has to do.
        tokens: that one call generates.
        check: raises ``AssertionError`` unless the call's result is right; ours have one.
        under: entered around every call, outside the clock (it chooses a backend or an instruction set).
        parts: seconds of the pieces of each call, appended by ``call`` itself, by name.
        host: time what the host spends on the call without waiting for the device, not what the device spends.
        count: so many units of work are one call (the nodes of a graph); its time is divided by it.
    """

    name: str
    call: Call
    bytes: float = 0
    flops: float = 0
    tokens: float = 0
    check: Callable[[], None] | None = None
    under: Callable[[], AbstractContextManager[object]] = nullcontext
    parts: dict[str, list[float]] = field(default_factory=dict)
    host: bool = False
    count: int = 1


@dataclass(frozen=True)
class Ratio:
    """A figure of two providers, taken from pairs of the same round.

    ``kind`` "speed": how many times as fast ``of`` is as the fastest of ``against``; "time": its time as a multiple of theirs;
    "rate": its bytes per second as a share of theirs; "more": the microseconds that it takes beyond theirs.
    """

    metric: str
    of: str
    against: tuple[str, ...]
    kind: str = "speed"


@dataclass
class Work:
    """A case with its memory allocated: who takes turns, what is derived from it, and plain figures by (provider, metric).

    ``finish`` gives more of those, after the timing; ``derive`` figures of each round, for what no ``Ratio`` says.
    """

    providers: list[Provider]
    ratios: list[Ratio] = field(default_factory=list)
    facts: dict[tuple[str, str], float] = field(default_factory=dict)
    finish: Callable[[], dict[tuple[str, str], float]] = dict
    derive: Callable[[Any], dict[tuple[str, str], list[float]]] = lambda timed: {}


@dataclass(frozen=True)
class Grid:
    """The cases of an op: every combination. Matrices are ``ROWSxCOLS``; tokens (0,) for ops that have none; ``on``: "cuda", "cpu" only."""

    matrices: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ("2:4",)
    dtypes: tuple[str, ...] = ("float32",)
    tokens: tuple[int, ...] = (0,)
    models: tuple[str, ...] = ()
    on: str = ""


@dataclass(frozen=True)
class Ask:
    """What the user narrowed down; an empty tuple leaves a family's own choice."""

    ops: tuple[str, ...] = ()
    matrices: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()


Build = Callable[[Spec, str], Work]


@dataclass(frozen=True)
class Family:
    """The cases of one op."""

    op: str
    build: Build
    grids: tuple[Grid, ...]

    def specs(self, ask: Ask, device: str = "cpu") -> Iterator[Spec]:
        """Every case on this device that ``ask`` leaves, each once."""
        seen: dict[Spec, None] = {}
        for grid in (grid for grid in self.grids if device.startswith(grid.on)):
            for pattern in ask.patterns or grid.patterns:
                for dtype in ask.dtypes or grid.dtypes:
                    seen.update(dict.fromkeys(self._sized(grid, ask, pattern, dtype)))
        yield from seen

    def _sized(self, grid: Grid, ask: Ask, pattern: str, dtype: str) -> Iterator[Spec]:
        for tokens in (ask.tokens or grid.tokens) if any(grid.tokens) else (0,):
            for matrix in (ask.matrices or grid.matrices) if grid.matrices else ():
                rows, cols = sizes(matrix)
                if not pattern or cols % Pattern(pattern).m == 0:
                    yield Spec(self.op, pattern, dtype, rows, cols, tokens)
            # a whole model has its own sizes
            for model in grid.models if not ask.matrices else ():
                yield Spec(self.op, pattern, dtype, tokens=tokens, model=model)


FAMILIES: dict[str, Family] = {}
"""Every family by op, in the order of registration; ``bench.cases`` fills it."""


def family(*ops: str, grids: Sequence[Grid]) -> Callable[[Build], Build]:
    """Register the decorated ``build(spec, device) -> Work`` for each of ``ops``, with the combinations that a full run takes."""

    def register(build: Build) -> Build:
        for op in ops:
            FAMILIES[op] = Family(op, build, tuple(grids))
        return build

    return register


def sizes(matrix: str) -> tuple[int, int]:
    """Rows and columns of ``"4096x11008"``."""
    rows, x, cols = matrix.partition("x")
    if x and rows.isdecimal() and cols.isdecimal() and int(rows) and int(cols):
        return int(rows), int(cols)
    raise NMError(f"{matrix!r} is no matrix; write ROWSxCOLS, such as 4096x11008.")


@dataclass(frozen=True)
class Instead:
    """Another bound where the cases' own rows of ``provider`` have at least so much of ``metric``: more is asked of a better machine."""

    bound: float
    provider: str
    metric: str
    least: float


@dataclass(frozen=True)
class Target:
    """One bound on one metric over some cases.

    Args:
        key: names it in ``missed.txt``.
        what, against: the words of the table.
        metric, provider: of the rows that are compared with the bound.
        bound: at least this, or with ``higher=False`` at most.
        stretch: the same for the goal beyond; None where there is none.
        specs: the cases; all must meet the bound.
        instead: the bound in its place, where the rows of every case say so.
    """

    key: str
    what: str
    against: str
    metric: str
    bound: float
    specs: tuple[Spec, ...]
    stretch: float | None = None
    higher: bool = True
    provider: str = CPU
    instead: Instead | None = None

    def meets(self, value: float, bound: float | None = None) -> bool:
        """Whether a measured ratio, to two decimals as it is shown, meets the bound (or another one)."""
        limit = self.bound if bound is None else bound
        return round(value, 2) >= limit if self.higher else round(value, 2) <= limit


NOISE = 1.03
"""A ratio may exceed what is allowed by so much before it says something: medians of two runs differ by as much."""


@dataclass(frozen=True)
class Verdict:
    """A target with what was measured: the ratio of each case that has a row, and why it is missed where it is.

    ``roofline`` is the share that ours reaches of what bytes and FMAs allow, ``allowed`` how many times as fast as dense they allow
    ours to be, of the cases that have such rows.
    """

    target: Target
    measured: dict[Spec, float]
    reason: str
    roofline: dict[Spec, float] = field(default_factory=dict)
    allowed: dict[Spec, float] = field(default_factory=dict)

    def slow_opponent(self, spec: Spec) -> bool:
        """Whether a speed-up is more than bytes and FMAs allow: then the dense opponent is further from the roofline than ours."""
        return spec in self.allowed and self.measured[spec] > NOISE * self.allowed[spec]

    @property
    def state(self) -> str:
        """``met``, ``stretch`` (met beyond), ``missed`` or ``unmeasured`` (a case has no row)."""
        values, t = self.measured.values(), self.target
        if any(not t.meets(v) for v in values):
            return "missed"
        if len(self.measured) < len(t.specs):
            return "unmeasured"
        return "stretch" if t.stretch is not None and all(t.meets(v, t.stretch) for v in values) else "met"
