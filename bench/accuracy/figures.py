"""Figures of the page.

The curves are computed from rows and traces first, and their digest is stored in the file, so that a check needs no drawing.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..figures import painted
from . import traces
from .cells import Case, Cells, mean
from .spec import DENSE, TUNING_SEEDS, RunSpec
from .stats import Estimate, estimate
from .tables import curve


@dataclass(frozen=True)
class Line:
    """One curve, labelled at its last point; ``errors`` are half widths of 95 % intervals, empty for none."""

    label: str
    x: list[float]
    y: list[float]
    errors: list[float] = field(default_factory=list)
    style: str = "-"


@dataclass(frozen=True)
class Figure:
    """The curves and axes of a figure.

    Args:
        xscale, yscale: ``"linear"`` or ``"log"``.
    """

    lines: list[Line]
    xlabel: str
    ylabel: str
    xscale: str = "linear"
    yscale: str = "log"

    @property
    def digest(self) -> str:
        """A digest of the curves, rounded to six digits."""
        return "data sha256 " + hashlib.sha256(json.dumps(_rounded(asdict(self)), sort_keys=True).encode()).hexdigest()


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value


def draw(figure: Figure, path: Path) -> bool:
    """Write the figure as SVG; False without matplotlib."""
    return painted(path, lambda axes: _paint(figure, axes), legend=False, description=figure.digest)


def current(figure: Figure, path: Path) -> bool:
    """True if the file shows this figure."""
    return path.exists() and figure.digest in path.read_text(encoding="utf-8")


GAP = 0.045
"""The least distance between two labels, as a share of the height of the axes."""


def _paint(figure: Figure, axes: Any) -> bool:
    axes.set_xscale(figure.xscale)
    axes.set_yscale(figure.yscale)
    axes.set_xlabel(figure.xlabel)
    axes.set_ylabel(figure.ylabel)
    drawn = []
    for i, line in enumerate(figure.lines):
        colour = "black" if line.label.startswith(DENSE) else f"C{i % 10}"
        if line.errors:
            axes.errorbar(line.x, line.y, yerr=line.errors, fmt=line.style, marker="o", markersize=3, capsize=2, linewidth=1, color=colour)
        else:
            axes.plot(line.x, line.y, line.style, markersize=3, linewidth=1, color=colour)
        drawn.append((line, colour))
    axes.set_ylim(axes.get_ylim())  # reading the limits fixes them, and with them the heights
    # labels are placed right of the axes at the height of the last point, and pushed apart if they would overlap
    heights = [axes.transAxes.inverted().transform(axes.transData.transform((line.x[-1], line.y[-1])))[1] for line, _ in drawn]
    for (line, colour), height in zip(drawn, spaced(heights, GAP), strict=True):
        axes.annotate(
            line.label,
            (line.x[-1], line.y[-1]),
            (1.03, height),
            textcoords="axes fraction",
            color=colour,
            fontsize=7,
            va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.4, "alpha": 0.6, "relpos": (0, 0.5)},
        )
    return bool(drawn)


def spaced(heights: Sequence[float], gap: float) -> list[float]:
    """Move heights up until neighbours are ``gap`` apart, then shift all back by half of what the highest moved.

    Example:
        >>> spaced([0.5, 0.0], 0.25)
        [0.5, 0.0]
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    found = list(heights)
    for low, high in itertools.pairwise(order):
        found[high] = max(found[high], found[low] + gap)
    shift = (found[order[-1]] - heights[order[-1]]) / 2 if order else 0.0
    return [height - shift for height in found]


def rates(cells: Cells, task: str, pattern: str, names: Sequence[str], optimizer: str = "adamw") -> Figure:
    """The figure of the validation loss against the peak rate: means over the tuning seeds, a curve per method."""
    lines = []
    for name in names:
        case = Case(task, name, pattern, optimizer)
        steps = case.settings.tune_steps
        points = [(lr, mean(cells.at(case, lr, steps, TUNING_SEEDS)).mean) for lr in cells.rates(case, steps, TUNING_SEEDS)]
        points = [point for point in points if math.isfinite(point[1])]
        if len(points) > 1:
            lines.append(Line(name, [x for x, _ in points], [y for _, y in points], style="o-"))
    lines = [] if all(line.label == DENSE for line in lines) else lines
    words = {"adamw": "AdamW", "sgd": "SGD with momentum"}
    return Figure(lines, f"peak learning rate, {words[optimizer]}", f"validation loss, nats ({pattern})", "log", "log")


def moments(cells: Cells, folder: Path, task: str, pattern: str, names: Sequence[str], lr: float) -> Figure:
    """The figure of √(mean v̂) over the steps at one rate: Adam's bias-corrected second moment, averaged over maskable weights and seeds.

    v̂ = v / (1 − β₂^t), with t at most STEP's T₀ if it froze v; a step is scaled by 1 / √v̂.
    """
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    switched = {row.spec.key: row.switch_step for row in cells.rows if row.task == task and row.switch_step}
    for line in traces.load(folder, task):
        spec = RunSpec.from_key(line["run"])
        wanted = (Case(task, spec.method, pattern).key, spec.lr, spec.steps)
        usual = wanted == ((task, spec.method, spec.pattern, spec.optimizer, spec.beta2), lr, Case(task, DENSE, pattern).settings.steps)
        if usual and spec.method in names and spec.seed in TUNING_SEEDS and line["v_mean"]:
            step = int(line["step"])
            frozen = switched.get(line["run"], step) if not spec.method.endswith("-thawed") else step
            corrected = float(line["v_mean"]) / (1 - spec.beta2 ** min(step, frozen))
            found.setdefault((spec.method, spec.pattern), {}).setdefault(step, []).append(math.sqrt(corrected))
    lines = []
    for name in names:
        steps = found.get((name, DENSE if name == DENSE else pattern), {})
        if steps:
            lines.append(Line(name, [float(s) for s in sorted(steps)], [estimate(steps[s]).mean for s in sorted(steps)]))
    return Figure(lines, "step", f"√(mean v̂) over maskable weights ({pattern}, lr {lr:g})")


def flops(cells: Cells, task: str, pattern: str, names: Sequence[str] = ()) -> Figure:
    """The figure of the validation loss against training FLOPs: runs of several lengths, a curve per method."""
    lines = []
    for name in names or [DENSE, *dict.fromkeys(m for m, p in cells.cases(task) if p == pattern)]:
        points = curve(cells, Case(task, name, pattern))
        budgets = sorted({x for mine in points.values() for x in mine})
        means = [_finite(estimate(mine[x] for mine in points.values() if x in mine)) for x in budgets]
        if len(budgets) > 1:
            lines.append(Line(name, budgets, [e.mean for e in means], [e.half for e in means], "--" if name == DENSE else "-"))
    return Figure(lines, f"training FLOPs of the linear layers ({pattern})", "validation loss, nats", "log", "linear")


def _finite(e: Estimate) -> Estimate:
    return e if math.isfinite(e.half) else Estimate(e.mean, 0.0, e.n, e.p)
