"""One run, described in full."""

from __future__ import annotations

from dataclasses import dataclass

EVALUATION_SEEDS = (0, 1, 2, 3, 4)
"""Seeds of the weights and of the order of the data, for every figure that is reported."""

TUNING_SEEDS = (100, 101)
"""Other seeds, on which learning rates are chosen."""

DENSE = "dense"
"""What stands in the place of a pattern where nothing is sparse."""


@dataclass(frozen=True)
class RunSpec:
    """What one run trains, and why.

    Args:
        task, method: names known to ``tasks`` and ``methods``.
        pattern: ``"2:4"``, or ``"dense"``.
        seed: of the first weights, the order of the data and the recipe's draws.
        lr: peak learning rate.
        steps: optimizer steps.
        purpose: ``"scout"`` or ``"tune"`` on tuning seeds, ``"shared"``, ``"tuned"`` or ``"variant"`` on evaluation seeds. A label only:
            two runs that differ in nothing else are the same run.
    """

    task: str
    method: str
    pattern: str
    seed: int
    lr: float
    steps: int
    purpose: str = "shared"

    @property
    def key(self) -> str:
        """What tells this run from others: ``gpt/step/2:4/0.004/1000/0``."""
        return f"{self.task}/{self.method}/{self.pattern}/{self.lr:g}/{self.steps}/{self.seed}"
