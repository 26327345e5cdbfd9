"""The cost of the runs, and of experiments too large to run here on one GPU."""

from __future__ import annotations

from dataclasses import dataclass

from .cells import Cells
from .tables import table

PEAK = 989e12
"""Dense bf16 FLOP/s of an H100 SXM, from its data sheet."""

USED = 0.4
"""The share of it that good training code reaches: an assumption, like the runs below."""

RUNS = 7 * 5 + 7 * 5 * 2
"""Runs of seven methods at one pattern: five evaluation seeds, and a search of five rates on two tuning seeds."""


@dataclass(frozen=True)
class TooLarge:
    """An experiment of the papers that is not run here; ``flops`` are those of one dense run, forward and backward."""

    what: str
    flops: float


TOO_LARGE = (
    # 6 FLOPs per weight and token: BERT-base has 85 M weights in its layers, SST-2 67,349 texts of 26 tokens, 3 epochs
    TooLarge("BERT-base fine-tuned on SST-2, 3 epochs", 6 * 85e6 * 67349 * 26 * 3),
    # 4.1 G multiply-adds an image forward, three times that with backward; 1.28 M images, 90 epochs
    TooLarge("ResNet-50 on ImageNet, 90 epochs", 2 * 3 * 4.1e9 * 1.28e6 * 90),
    # the base model: 65 M weights, 100,000 steps of 50,000 tokens (Vaswani et al., 2017)
    TooLarge("Transformer base on WMT en–de, 100,000 steps", 6 * 65e6 * 100_000 * 50_000),
    # 124 M weights, 10 G tokens
    TooLarge("GPT-2 small, 10 billion tokens", 6 * 124e6 * 10e9),
)


def estimates() -> str:
    """A table of the GPU hours of the experiments that are too large to run here, for ``RUNS`` runs of each."""
    lines = [["what", "FLOPs of a dense run", "hours of a run", f"hours of {RUNS} runs"]]
    for each in TOO_LARGE:
        hours = each.flops / (PEAK * USED) / 3600
        lines.append([each.what, f"{each.flops:.1e}", _short(hours), _short(hours * RUNS)])
    return table(lines)


def _short(hours: float) -> str:
    return f"{hours:.0f}" if hours >= 10 else f"{hours:.1g}"


def spent(cells: Cells) -> str:
    """A table of the runs, their median seconds and the CPU-hours of every task, by machine; one thread each."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in [*cells.rows, *cells.again]:
        found.setdefault((row.task, row.machine), []).append(row.seconds)
    lines = [["task", "machine", "runs", "seconds of a run, median", "CPU-hours"]]
    for (task, machine), seconds in sorted(found.items()):
        median = sorted(seconds)[len(seconds) // 2]
        lines.append([f"`{task}`", machine, str(len(seconds)), f"{median:.1f}", f"{sum(seconds) / 3600:.1f}"])
    every = [second for seconds in found.values() for second in seconds]
    return table([*lines, ["all", "", str(len(every)), "", f"{sum(every) / 3600:.1f}"]])
