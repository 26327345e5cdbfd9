"""What sparsify_ did with every layer, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """One layer: its name, weight shape ``(out, in)`` where it has one, whether it was made sparse, and the reason."""

    name: str
    kind: str
    shape: tuple[int, ...]
    sparse: bool
    reason: str


@dataclass
class Report:
    """Every linear-like layer of a model with the decision about it; ``str`` of it is a table.

    ``channels`` says of each sparse layer, by name, whether its input channels are reordered before pruning, where the recipe searches.

    Example:
        >>> print(Report([Entry("fc", "Linear", (8, 16), True, "2:4")]))
        layer  kind    shape   sparse  why
        fc     Linear  (8,16)  yes     2:4
        1 of 1 layers sparse, 128 of 128 weights maskable
    """

    entries: list[Entry] = field(default_factory=list)
    channels: dict[str, str] = field(default_factory=dict)

    @property
    def sparse(self) -> list[Entry]:
        """The layers that were made sparse."""
        return [e for e in self.entries if e.sparse]

    @property
    def skipped(self) -> list[Entry]:
        """The layers that were left dense."""
        return [e for e in self.entries if not e.sparse]

    def __str__(self) -> str:
        rows = [("layer", "kind", "shape", "sparse", "why")]
        for e in self.entries:
            shape = "(" + ",".join(str(s) for s in e.shape) + ")"
            rows.append((e.name or "(root)", e.kind, shape, "yes" if e.sparse else "no", e.reason))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row[:4], widths, strict=True)), row[4]]).rstrip() for row in rows]
        weights = [_numel(e.shape) for e in self.entries]
        masked = sum(w for w, e in zip(weights, self.entries, strict=True) if e.sparse)
        lines.append(f"{len(self.sparse)} of {len(self.entries)} layers sparse, {masked} of {sum(weights)} weights maskable")
        if self.channels:
            width = max(map(len, self.channels))
            lines += ["input channels", *(f"{name.ljust(width)}  {said}" for name, said in self.channels.items())]
        return "\n".join(lines)


def _numel(shape: tuple[int, ...]) -> int:
    return math.prod(shape) if shape else 0
