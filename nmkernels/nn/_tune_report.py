"""What ``nm.tune`` found, as data and as a table."""

from __future__ import annotations

from dataclasses import dataclass, field

HEADER = ("layer", "product", "shape", "tokens", "default ms", "best ms", "gain", "choice")


@dataclass
class Tuned:
    """What was found for one product of some layers.

    Args:
        layers: their names. kind: their class. product: ``fprop``, ``dgrad``, ``wgrad``, or empty where the layer has none to tune.
        shape: (out, in). tokens: of the input. pattern, dtype: of the compressed operand.
        default, best: seconds of what is done where nothing was measured (of a launch: by the heuristic; of a choice: dense, or by the
            backend of highest priority) and of the fastest right one; None where nothing was timed.
        choice: that fastest one, or why nothing was tuned.
        refused: those whose result was wrong or that failed, each with the reason; they are never chosen.
    """

    layers: list[str]
    kind: str
    product: str = ""
    shape: tuple[int, int] = (0, 0)
    tokens: int = 0
    pattern: str = ""
    dtype: str = ""
    default: float | None = None
    best: float | None = None
    choice: str = ""
    refused: list[str] = field(default_factory=list)

    @property
    def gain(self) -> float | None:
        """How many times as fast the best is; None where nothing was timed."""
        return None if self.default is None or self.best is None else self.default / self.best

    def cells(self) -> tuple[str, ...]:
        """Its row of the table."""
        kind = f"{self.kind} x{len(self.layers)}" if len(self.layers) > 1 else self.kind
        product = " ".join(part for part in (self.product, self.pattern, self.dtype) if part)
        times = [f"{1e3 * t:.4f}" if t is not None else "" for t in (self.default, self.best)]
        gain = f"{self.gain:.2f}x" if self.gain is not None else ""
        return kind, product, f"({self.shape[0]},{self.shape[1]})", str(self.tokens or ""), *times, gain, self.choice


@dataclass
class TuneReport:
    """What ``tune`` found; ``str`` of it is a table.

    ``choices`` has the way that each product of layers of one shape is done, such as ``dense`` or ``cpu rows``; ``entries`` how Triton's
    kernels are launched, and layers that have nothing to tune. ``paths`` are the files that was written to; where there are none, ``note``
    says why.

    Example:
        >>> print(TuneReport([Tuned(["fc"], "SparseLinear", shape=(8, 16), choice="its products are dense")]))
        layer         product  shape   tokens  default ms  best ms  gain  choice
        SparseLinear           (8,16)                                     its products are dense
        nothing to store
    """

    entries: list[Tuned] = field(default_factory=list)
    choices: list[Tuned] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    note: str = "nothing to store"

    @property
    def path(self) -> str | None:
        """The files, or None."""
        return ", ".join(self.paths) or None

    @property
    def changed(self) -> list[Tuned]:
        """Launches that are no longer the heuristic's, and products that are no longer done as they are where nothing was measured."""
        launches = [e for e in self.entries if e.best is not None and not e.choice.startswith("default")]
        return launches + [c for c in self.choices if c.best is not None and c.best != c.default]

    def __str__(self) -> str:
        every = [*self.choices, *self.entries]
        rows = [HEADER, *(e.cells() for e in every)]
        widths = [max(len(row[i]) for row in rows) for i in range(7)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row[:7], widths, strict=True)), row[7]]).rstrip() for row in rows]
        lines += [f"refused, {e.product} {e.shape[0]}x{e.shape[1]}: {why}" for e in every for why in e.refused]
        return "\n".join([*lines, f"stored in {self.path}" if self.paths else self.note])
