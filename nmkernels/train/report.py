"""The report of ``sparsify_``: which layers are sparse, and why the others are not."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

FILTERED = "not chosen by the filter"
"""The reason of a layer that could have been made sparse."""


@dataclass(frozen=True)
class Entry:
    """One layer: its name, weight shape ``(out, in)`` where it has one, whether it was made sparse, and the reason.

    ``linear``: its weight is multiplied by a GEMM (of a linear layer, of experts, of attention), or by a convolution whose input channels
    can form groups; False for lookups and other convolutions.
    ``rows``: how often a token passes through it (through each of stacked experts); None for once, and unknown for other 3-D weights and
    for convolutions.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    sparse: bool
    reason: str
    linear: bool = True
    rows: float | None = None


@dataclass(frozen=True)
class Pruned:
    """How ``prune_`` has pruned one layer, or one expert's matrix.

    ``error`` is ‖X(W−Z)ᵀ‖² / ‖XWᵀ‖² on the calibration data, Z the pruned weight as it is stored, and ``wanda`` the same for Wanda's mask
    without new values. ``tokens`` were seen; ``damping`` was added to the Hessian, as a share of its mean diagonal; ``memory`` is the peak
    of the device, or on a CPU of the process, in bytes; ``note`` says what did not go as planned. ``rounded`` is the error with the
    integers that ``values=`` names instead of Z's values.
    """

    error: float | None
    wanda: float | None
    tokens: int
    damping: float
    seconds: float
    memory: int
    note: str = ""
    rounded: float | None = None


@dataclass
class Report:
    """Every layer of a model that has a weight, except norms, with the decision about it; ``str`` of it is a table.

    Layers whose names differ only in numbers share a line if all else is equal. ``channels``: by layer, whether input channels were
    reordered before pruning, where the recipe searches; ``pruned``: by layer, what ``prune_`` did; ``remark``: what a user should know of
    how the schedule went; ``unmeasured``: that the way in which GEMMs are done rests on no measurement.

    Example:
        >>> blocks = [Entry(f"fc.{i}", "Linear", (8, 16), True, "2:4") for i in range(3)]
        >>> print(Report([*blocks, Entry("out", "Linear", (4, 8), False, "tiny")]))
        layer    kind    shape   sparse  why
        fc.* ×3  Linear  (8,16)  yes     2:4
        out      Linear  (4,8)   no      tiny
        3 of 4 linear layers sparse, with 384 of 416 weights (92.3 %); left dense:
           7.7 %  tiny (1 layer)
    """

    entries: list[Entry] = field(default_factory=list)
    channels: dict[str, str] = field(default_factory=dict)
    pruned: dict[str, Pruned] = field(default_factory=dict)
    remark: str = ""
    unmeasured: str = ""

    @property
    def sparse(self) -> list[Entry]:
        """The layers that were made sparse."""
        return [e for e in self.entries if e.sparse]

    @property
    def skipped(self) -> list[Entry]:
        """The layers that were left dense."""
        return [e for e in self.entries if not e.sparse]

    def explain(self, reasons: Mapping[str, str]) -> None:
        """Replace the reasons of layers that the filter left dense, by name."""
        self.entries = [replace(e, reason=reasons[e.name]) if e.reason == FILTERED and e.name in reasons else e for e in self.entries]

    def __str__(self) -> str:
        rows = [("layer", "kind", "shape", "sparse", "why")]
        for name, e in _together(self.entries):
            shape = "(" + ",".join(str(s) for s in e.shape) + ")"
            rows.append((name, e.kind, shape, "yes" if e.sparse else "no", e.reason))
        lines = aligned(rows) + self._shares()
        rest = [e for e in self.entries if not e.linear]
        if rest:
            kinds = ", ".join(f"{kind} ×{n}" if n > 1 else kind for kind, n in Counter(e.kind for e in rest).items())
            lines.append(f"other layers have {sum(map(_numel, rest))} weights: {kinds}")
        if self.channels:
            lines += ["input channels", *aligned([*self.channels.items()])]
        if self.pruned:
            lines += _pruned_table(self.pruned)
        return "\n".join([*lines, *filter(None, (self.remark, self.unmeasured))])

    def _shares(self) -> list[str]:
        linear = [e for e in self.entries if e.linear]
        total, masked = sum(map(_numel, linear)), sum(map(_numel, self.sparse))
        kinds = "linear layers and convolutions" if any(len(e.shape) > 3 for e in linear) else "linear layers"
        first = f"{len(self.sparse)} of {len(linear)} {kinds} sparse, with {masked} of {total} weights"
        if not total:
            return [first]
        left: dict[str, list[Entry]] = {}
        for e in linear:
            if not e.sparse:
                left.setdefault(e.reason, []).append(e)
        shares = sorted(((sum(map(_numel, es)), reason, len(es)) for reason, es in left.items()), key=lambda share: -share[0])
        lines = [f"{100 * w / total:6.1f} %  {reason} ({count} layer{'s' * (count > 1)})" for w, reason, count in shares]
        return [f"{first} ({100 * masked / total:.1f} %){'; left dense:' * bool(lines)}", *lines]


def _pruned_table(pruned: Mapping[str, Pruned]) -> list[str]:
    def share(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.2f} %"

    rounded = any(p.rounded is not None for p in pruned.values())
    rows = [("pruned", "error", *["rounded"] * rounded, "Wanda's", "tokens", "damping", "seconds", "memory", "")]
    for name, p in pruned.items():
        errors = share(p.error), *[share(p.rounded)] * rounded, share(p.wanda)
        rows.append((name, *errors, str(p.tokens), f"{p.damping:g}", f"{p.seconds:.1f}", f"{p.memory / 1e9:.2f} GB", p.note))
    return aligned(rows)


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A line for each row, all cells but the last one as wide as their column."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip() for row in rows]


def starred(name: str) -> str:
    """``name`` with a star for each number between its dots: h.11.mlp.fc1 becomes h.*.mlp.fc1."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _together(entries: list[Entry]) -> list[tuple[str, Entry]]:
    """One name and entry for layers whose names differ only in numbers; each layer alone where anything else differs."""
    alike: dict[str, list[Entry]] = {}
    for e in entries:
        alike.setdefault(starred(e.name), []).append(e)
    rows = []
    for e in entries:
        group = alike[starred(e.name)]
        if len(group) == 1 or len({replace(other, name="") for other in group}) > 1:
            rows.append((e.name or "(root)", e))
        elif e is group[0]:
            rows.append((f"{starred(e.name)} ×{len(group)}", e))
    return rows


def _numel(e: Entry) -> int:
    return math.prod(e.shape) if e.shape else 0
