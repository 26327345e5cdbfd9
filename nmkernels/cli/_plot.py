"""The curves of a run as one picture."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from ..export import atomic_write

Rows = list[dict[str, float]]


def plot(path: Path, sparse: Rows, twin: Rows, title: str, switch_step: int = 0) -> bool:
    """Draw loss and flip rate over steps, a line at the phase change, and the twin where there is one; False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    loss, flips = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    if twin:
        _loss(loss, twin, "dense twin", "tab:gray")
    _loss(loss, sparse, "sparse", "tab:blue")
    loss.set_ylabel("loss (nats per byte)")
    loss.set_title(title)
    flips.plot(*_column(sparse, "flip_rate", 100), color="tab:blue")
    flips.set_ylabel("mask flips per step (%)")
    flips.set_xlabel("step")
    for axes in (loss, flips):
        for i, step in enumerate([switch_step] if switch_step else switches(sparse)):
            axes.axvline(step, color="tab:red", linestyle="--", linewidth=1, label="phase change" if i == 0 else None)
        axes.grid(alpha=0.3)
    loss.legend()
    atomic_write(path, figure.savefig)
    return True


def switches(rows: Rows) -> list[float]:
    """Steps of the first rows of each later phase."""
    with_phase = [row for row in rows if "phase" in row]
    return [b["step"] for a, b in pairwise(with_phase) if a["phase"] != b["phase"]]


def _column(rows: Rows, name: str, scale: float = 1.0) -> tuple[list[float], list[float]]:
    have = [row for row in rows if name in row]
    return [row["step"] for row in have], [scale * row[name] for row in have]


def _loss(axes: Any, rows: Rows, label: str, color: str) -> None:
    axes.plot(*_column(rows, "loss"), color=color, alpha=0.5, linewidth=1, label=f"{label}, training")
    axes.plot(*_column(rows, "val_loss"), color=color, marker="o", markersize=3, label=f"{label}, validation as deployed")
