"""Traces of the recipe during training, about 40 lines a run: ``trace-<task>.csv``, compact because there are many runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nmkernels as nm
from nmkernels.nn import NMWeight

from .. import rows as machine_rows
from . import rows

STRIDE = 25
"""Steps between two lines of a trace of up to 1000 steps."""

COLUMNS = (
    *("run", "step", "loss", "flip_rate", "flip_rate_stride", "density", "decay_ratio", "max_update"),
    *("v_mean", "v_change", "z_bar", "threshold"),
)
"""``loss``: mean training loss since the last line. ``flip_rate``: share of mask bits of maskable weights changed by this step, counted by
the recipe (0 if nothing is masked). ``flip_rate_stride``: share of bits of the magnitude mask that differ from the previous line, whatever
mask the recipe uses. ``density``, ``decay_ratio``, ``max_update``: ``handle.metrics()``. ``v_mean``: mean of Adam's raw second moment over
maskable weights; ``v_change``: mean |v_t − v_{t−1}| of this step, AutoSwitch's Z_t. ``z_bar`` and ``threshold``: the two values that
AutoSwitch compares. Empty if there is no value."""


def stride(steps: int) -> int:
    """Steps between two lines of the trace of a run of ``steps`` steps."""
    return max(STRIDE, steps // 40)


class Trace:
    """The lines of one run, one every ``stride`` steps."""

    def __init__(self, run: str, pattern: str, layers: dict[str, NMWeight], stride: int = STRIDE) -> None:
        self.run, self.pattern, self.layers, self.stride = run, pattern, layers, stride
        self.lines: list[dict[str, str]] = []
        self._losses: list[float] = []
        self._masks = self._magnitude_masks()

    def _magnitude_masks(self) -> list[Tensor]:
        return [nm.ops.mask(layer.master.detach(), self.pattern) for layer in self.layers.values()] if ":" in self.pattern else []

    def after(self, step: int, loss: float, handle: Any, optimizer: torch.optim.Optimizer) -> None:
        """Record a step, counted from 1, and its training loss; every ``stride`` steps a line is written."""
        self._losses.append(loss)
        if step % self.stride:
            return
        masks = self._magnitude_masks()
        weights = sum(m.numel() for m in masks)
        flips = sum(int((new ^ old).sum()) for new, old in zip(masks, self._masks, strict=True))
        figures = {name: float(value) for name, value in handle.metrics().items()}
        values: dict[str, float | None] = {
            "loss": sum(self._losses) / len(self._losses),
            "flip_rate_stride": flips / weights if weights else None,
            **{name: figures.get(name) for name in ("flip_rate", "density", "decay_ratio", "max_update", "z_bar")},
            "threshold": handle.state.get("threshold"),
            **_second_moments(self.layers, optimizer),
        }
        self.lines.append({"run": self.run, "step": str(step), **{k: _short(values.get(k)) for k in COLUMNS[2:]}})
        self._losses, self._masks = [], masks


def _second_moments(layers: dict[str, NMWeight], optimizer: torch.optim.Optimizer) -> dict[str, float | None]:
    moments = [state["exp_avg_sq"] for layer in layers.values() if "exp_avg_sq" in (state := optimizer.state.get(layer.weight, {}))]
    size = sum(v.numel() for v in moments)
    stats = getattr(optimizer, "stats", None)
    change = None if stats is None or not size else float(stats[nm.ops.STATS.index("v_change")]) / size
    return {"v_mean": sum(float(v.sum()) for v in moments) / size if size else None, "v_change": change}


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def path(folder: Path, task: str) -> Path:
    """The file of a task's traces."""
    return folder / f"trace-{task}.csv"


def load(folder: Path, task: str) -> list[dict[str, str]]:
    """All lines of a task, the last ones of each run; empty if there is no file."""
    lines = rows.load_lines(path(folder, task))
    return list({(line["run"], line["step"]): line for line in lines}.values())


def append(lines: Iterable[dict[str, str]], folder: Path, task: str) -> None:
    """Append the lines of finished runs; for ``load`` they replace earlier ones of the same runs."""
    rows.append_lines(lines, COLUMNS, path(folder, task))


def tidy(folder: Path, task: str) -> None:
    """Sort the lines and drop those that were replaced."""
    if path(folder, task).exists():
        with rows.locked(folder):
            lines = sorted(load(folder, task), key=lambda line: (line["run"], int(line["step"])))
            machine_rows.save(lines, COLUMNS, path(folder, task))
