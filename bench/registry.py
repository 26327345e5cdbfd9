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
"""Metrics of a GEMM: its share of the roofline, and the speed-up over dense that the roofline allows."""

FASTEST = "x fastest dense"
"""Metric: the speed-up over torch's fastest dense GEMM on a CPU, with the weight not packed in advance."""

AMX = "has AMX"
"""1 or 0, recorded with rows whose bounds depend on it."""

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Spec:
    """One case: the op, its pattern and dtype, a weight of ``rows`` x ``cols``, tokens (0 if there are none), or a whole model."""

    op: str
    pattern: str = "2:4"
    dtype: str = "float32"
    rows: int = 0
    cols: int = 0
    tokens: int = 0
    model: str = ""

    @property
    def shape(self) -> str:
        """The shape as written in the CSV: ``4096x11008``, ``16x4096x4096`` (tokens first), ``2048 tokens, GPT 1024x2``."""
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
        """The torch dtype."""
        return DTYPES[self.dtype]

    def __str__(self) -> str:
        return " ".join(part for part in (self.op, self.pattern, self.dtype, self.shape) if part)


@dataclass
class Provider:
    """One implementation of a case's work.

    Args:
        name: as shown in the CSV; ours start with ``nmkernels``.
        call: one unit of work.
        bytes: memory that one call must at least read and write.
        flops: floating-point operations of one call.
        tokens: tokens that one call generates.
        check: raises ``AssertionError`` if the call's result is wrong; ours have one.
        under: context entered around every call and not timed (it selects a backend or an instruction set).
        parts: seconds of the pieces of each call by name, appended by ``call`` itself.
        host: time the host, which does not wait for the device.
        count: units of work in one call (the nodes of a graph); its time is divided by this.
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
    """A metric of one provider relative to others, computed within each round.

    ``kind`` "speed": the speed-up of ``of`` over the fastest of ``against``; "time": its time as a multiple of theirs;
    "rate": its bytes per second as a share of theirs; "more": the microseconds it takes in addition to theirs.
    """

    metric: str
    of: str
    against: tuple[str, ...]
    kind: str = "speed"


@dataclass
class Work:
    """A case with its memory allocated: the providers, the ratios between them, and other figures by (provider, metric).

    ``finish`` returns more such figures after the timing; ``derive`` returns figures of each round that no ``Ratio`` covers.
    """

    providers: list[Provider]
    ratios: list[Ratio] = field(default_factory=list)
    facts: dict[tuple[str, str], float] = field(default_factory=dict)
    finish: Callable[[], dict[tuple[str, str], float]] = dict
    derive: Callable[[Any], dict[tuple[str, str], list[float]]] = lambda timed: {}


@dataclass(frozen=True)
class Grid:
    """The cases of an op: every combination. Matrices are ``ROWSxCOLS``; tokens are (0,) for ops without; ``on``: only "cuda" or "cpu"."""

    matrices: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ("2:4",)
    dtypes: tuple[str, ...] = ("float32",)
    tokens: tuple[int, ...] = (0,)
    models: tuple[str, ...] = ()
    on: str = ""


@dataclass(frozen=True)
class Ask:
    """What the user selected; an empty tuple leaves the family's default."""

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
        """Every case on this device that ``ask`` selects, each once."""
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
"""Every family by op, in the order of registration; filled by ``bench.cases``."""


def family(*ops: str, grids: Sequence[Grid]) -> Callable[[Build], Build]:
    """Register the decorated ``build(spec, device) -> Work`` for each of ``ops``, with the combinations of a full run."""

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
    raise NMError(f"{matrix!r} is not a matrix; write ROWSxCOLS, such as 4096x11008.")


@dataclass(frozen=True)
class Instead:
    """Another bound for cases whose rows of ``provider`` have ``metric`` of at least ``least``: a better machine has a higher target."""

    bound: float
    provider: str
    metric: str
    least: float


@dataclass(frozen=True)
class Target:
    """One bound on one metric over some cases.

    Args:
        key: its name in ``missed.txt``.
        what, against: the text in the table.
        metric, provider: of the rows that are compared with the bound.
        bound: the least value, or with ``higher=False`` the largest.
        stretch: the bound of the stretch goal, or None.
        specs: the cases, all of which must meet the bound.
        instead: a bound that replaces it if the rows of every case say so.
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
        """Whether a measured ratio, rounded to the two decimals shown, meets the bound (or another one)."""
        limit = self.bound if bound is None else bound
        return round(value, 2) >= limit if self.higher else round(value, 2) <= limit


NOISE = 1.03
"""Factor by which a ratio may exceed the allowed one: medians of two runs differ by as much."""


@dataclass(frozen=True)
class Verdict:
    """A target with its measurements: the ratio of each case that has a row, and the reason if it is missed.

    For cases that have such rows, ``roofline`` is our share of the roofline and ``allowed`` the speed-up over dense that it allows.
    """

    target: Target
    measured: dict[Spec, float]
    reason: str
    roofline: dict[Spec, float] = field(default_factory=dict)
    allowed: dict[Spec, float] = field(default_factory=dict)

    def slow_opponent(self, spec: Spec) -> bool:
        """Whether the speed-up is more than the roofline allows: the dense opponent is further from its roofline than ours."""
        return spec in self.allowed and self.measured[spec] > NOISE * self.allowed[spec]

    @property
    def state(self) -> str:
        """``met``, ``stretch`` (the stretch goal too), ``missed`` or ``unmeasured`` (a case has no row)."""
        values, t = self.measured.values(), self.target
        if any(not t.meets(v) for v in values):
            return "missed"
        if len(self.measured) < len(t.specs):
            return "unmeasured"
        return "stretch" if t.stretch is not None and all(t.meets(v, t.stretch) for v in values) else "met"
