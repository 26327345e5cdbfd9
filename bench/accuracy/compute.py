"""The FLOPs of a run, by the rule of ``nm.flops``."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from nmkernels import flops

from . import methods, tasks
from .rows import RunRow


@cache
def run_flops(task: str, method: str, pattern: str, steps: int, switch_step: int = 0) -> tuple[float, float]:
    """(training FLOPs of the whole run, inference FLOPs per token), of the linear layers.

    Args:
        switch_step: STEP's T₀, 0 where there is none.
    """
    it = tasks.get(task)
    recipe = methods.get(method).build(pattern, steps)
    cost = flops(it.model(), recipe, steps, tokens=it.tokens, rows=it.shares, switch_step=switch_step or None)
    return cost.training, cost.inference


def with_flops(row: RunRow) -> RunRow:
    """The row with its two columns of FLOPs; a run that diverged counts the steps that it did."""
    training, inference = run_flops(row.task, row.method, row.pattern, row.steps, row.switch_step)
    return replace(row, training_flops=training * row.done / row.steps, inference_flops=inference)
