"""Figures of the page, from rows and traces. The same rows give the same bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..figures import painted
from . import methods, traces
from .rows import RunRow
from .spec import DENSE, EVALUATION_SEEDS, RunSpec, mean_and_error
from .tables import Cases, shared
from .tasks.base import settings

Lines = list[dict[str, str]]
FLIPS = ("ste", "srste", "srste-2e-2", "step", "sste", "mdgf", "sdgf")
DECAYS = ("srste", "srste-2e-3", "srste-2e-2", "srste-2e-1")
BETAS = (0.99, 0.999)
PATTERN = "1:8"
"""The pattern of the figures over time."""


def draw(rows: list[RunRow], folder: Path, out: Path, task: str) -> list[Path]:
    """Write the figures of ``task`` that there are rows and traces for, as SVG, into ``out``; nothing without matplotlib.

    Args:
        folder: where the traces lie.
    """
    cases, lines = shared(rows, task), traces.load(folder, task)
    paints: dict[str, Callable[[Any], bool]] = {
        "sparsity": lambda axes: sparsity(cases, axes),
        "flips": lambda axes: flips(task, lines, axes),
        "decay": lambda axes: over_time(axes, task, lines, DECAYS, "decay_ratio", "λ Σ|w| / Σ|g| over pruned weights", log=True),
        "moments": lambda axes: moments(task, lines, axes),
        "switch": lambda axes: switch(task, lines, axes),
        "flops": lambda axes: flops(rows, task, axes),
    }
    paths = {name: out / f"{task}-{name}.svg" for name in paints}
    return [paths[name] for name, paint in paints.items() if painted(paths[name], paint)]


def _ratio(pattern: str) -> float:
    n, _, m = pattern.partition(":")
    return int(m) / int(n) if m else 1.0


def sparsity(cases: Cases, axes: Any) -> bool:
    """Validation loss against M/N, mean and standard error over seeds, of the core methods."""
    patterns = cases.patterns()
    for i, name in enumerate(name for name in methods.CORE if name != DENSE):
        points = [(_ratio(p), *mean_and_error(_losses(cases.of(name, p).values()))) for p in patterns if cases.of(name, p)]
        if points:
            xs, ys, errors = zip(*points, strict=True)
            # side by side, so that the error bars can be told apart
            axes.errorbar([x * (1 + 0.02 * (i - 3)) for x in xs], ys, yerr=errors, marker="o", markersize=3, capsize=2, label=name)
    dense = _losses(cases.of(DENSE, "").values())
    if not patterns or not dense:
        return False
    axes.axhline(mean_and_error(dense)[0], color="black", linewidth=0.8, linestyle="--", label="dense")
    axes.set_xscale("log", base=2)
    axes.set_xticks([_ratio(p) for p in patterns], patterns)
    axes.set_xlabel("pattern")
    axes.set_ylabel("validation loss, nats")
    return True


def _losses(rows: Iterable[RunRow]) -> list[float]:
    return [row.val_loss for row in rows if math.isfinite(row.val_loss)]


def over_time(
    axes: Any, task: str, lines: Lines, names: Iterable[str], column: str, label: str, pattern: str = PATTERN, log: bool = False
) -> bool:
    """One column of the traces against the step, the mean over seeds, a curve per method."""
    drawn = False
    for name in names:
        xs, ys = _mean_curve(task, lines, name, pattern, column)
        if any(ys):
            axes.plot(xs, ys, linewidth=1, label=f"{name} {pattern}")
            drawn = True
    if log and drawn:
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    return drawn


def _mean_curve(task: str, lines: Lines, name: str, pattern: str, column: str) -> tuple[list[int], list[float]]:
    s = settings(task)
    runs = {RunSpec(task, name, pattern, seed, s.lr, s.steps, "adamw", b).key for seed in EVALUATION_SEEDS for b in BETAS}
    found: dict[int, list[float]] = {}
    for line in lines:
        if line["run"] in runs and line[column]:
            found.setdefault(int(line["step"]), []).append(float(line[column]))
    steps = sorted(found)
    return steps, [sum(found[step]) / len(found[step]) for step in steps]


def flips(task: str, lines: Lines, axes: Any) -> bool:
    """Changed bits of the magnitude mask between two lines of the traces."""
    label = f"mask bits changed in {traces.STRIDE} steps / maskable weights"
    return over_time(axes, task, lines, FLIPS, "flip_rate_stride", label, log=True)


def moments(task: str, lines: Lines, axes: Any) -> bool:
    """Adam's second moment under masks over that of the dense baseline, at the same step and seed."""
    base = dict(zip(*_mean_curve(task, lines, DENSE, DENSE, "v_mean"), strict=True))
    drawn = False
    for name in ("ste", "srste", "mdgf", "sste"):
        for pattern, style in (("2:4", ":"), ("1:8", "--"), ("1:16", "-")):
            xs, ys = _mean_curve(task, lines, name, pattern, "v_mean")
            points = [(x, y / base[x]) for x, y in zip(xs, ys, strict=True) if base.get(x)]
            if points:
                colour = f"C{('ste', 'srste', 'mdgf', 'sste').index(name)}"
                axes.plot(*zip(*points, strict=True), style, color=colour, linewidth=1, label=f"{name} {pattern}")
                drawn = True
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("mean second moment / that of dense training")
    return drawn


def switch(task: str, lines: Lines, axes: Any) -> bool:
    """STEP's Z̄ and its threshold, a thin line for each seed; a curve ends where AutoSwitch fired."""
    drawn = False
    s = settings(task)
    for i, (name, text) in enumerate((("step", "arithmetic"), ("step-geometric", "geometric"))):
        for seed in EVALUATION_SEEDS:
            runs = {RunSpec(task, name, PATTERN, seed, s.lr, s.steps, "adamw", b).key for b in BETAS}
            mine = [line for line in lines if line["run"] in runs and line["z_bar"]]
            # after the switch Z̄ no longer moves
            mine = [a for a, b in itertools.pairwise(mine) if a["z_bar"] != b["z_bar"]]
            if mine:
                xs, ys = [int(line["step"]) for line in mine], [float(line["z_bar"]) for line in mine]
                axes.plot(xs, ys, color=f"C{i}", linewidth=0.8, label=f"Z̄, {text}" if seed == EVALUATION_SEEDS[0] else None)
                drawn = True
    threshold = next((line["threshold"] for line in lines if line["threshold"]), "")
    if drawn and threshold:
        axes.axhline(float(threshold), color="black", linestyle="--", linewidth=0.8, label="threshold")
    for share in (0.1, 0.5):
        axes.axvline(share * s.steps, color="grey", linestyle=":", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_xlabel("step (dotted: T_min and T_max)")
    axes.set_ylabel("Z̄")
    return drawn


def flops(rows: list[RunRow], task: str, axes: Any) -> bool:
    """Validation loss against training FLOPs at ``PATTERN``: runs of several lengths at the shared rate, a curve per method."""
    s = settings(task)
    lengths = sorted({row.steps for row in rows if row.task == task})
    drawn = False
    for name in methods.CORE:
        pattern = DENSE if name == DENSE else PATTERN
        points = []
        for steps in lengths:
            group = [
                r
                for r in rows
                if (r.task, r.method, r.pattern, r.steps, r.lr) == (task, name, pattern, steps, s.lr) and r.seed in EVALUATION_SEEDS
            ]
            if group and group[0].training_flops:
                points.append((sum(r.training_flops for r in group) / len(group), *mean_and_error(_losses(group))))
        if len(points) > 1:
            xs, ys, errors = zip(*points, strict=True)
            style = {"color": "black", "linestyle": "--"} if name == DENSE else {}
            axes.errorbar(xs, ys, yerr=errors, marker="o", markersize=3, capsize=2, linewidth=1, label=name, **style)
            drawn = True
    axes.set_xscale("log")
    axes.set_xlabel(f"training FLOPs of the linear layers ({PATTERN})")
    axes.set_ylabel("validation loss, nats")
    return drawn
