"""Predict whole training steps on a GPU, with the optimizer's update, and from how many tokens per update sparse training pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .flops import aligned
from .rules import LayerCosts, total

RECIPES = ("srste", "sste", "fst", "step")
"""Predicted for a dense model in addition to its own recipe."""

MOST_TOKENS = 1 << 24
EXACT = 1.02
"""The number of tokens is exact to this factor."""


@dataclass(frozen=True)
class WholeStep:
    """A predicted training step on a GPU under one recipe, optimizer included, compared with dense training with ``AdamW(fused=True)``.

    Args:
        recipe: its text; empty for the rules of a sparse model's layers.
        dense_bytes, sparse_bytes: bytes a weight that are moved outside of forward and backward, on average of the sparse layers.
        dense, sparse: seconds per optimizer update.
        speedup_range: for the slowest and fastest plausible sparse GEMMs.
        pays_from: tokens per update, in one forward pass on each GPU, from which a sparse step is faster; None for never.

    Example:
        >>> import nmkernels as nm
        >>> result = nm.audit({"up": (14336, 4096)}, 8192, "fst:2:4(end=None)", device="H200", dtype="bfloat16").whole[0]
        >>> f"{result.dense_bytes:g} {result.sparse_bytes:g}"
        '34 34.25'
    """

    recipe: str
    dense_bytes: float
    sparse_bytes: float
    dense: float
    sparse: float
    speedup_range: tuple[float, float]
    pays_from: int | None

    @property
    def speedup(self) -> float:
        """Speed-up of the step over dense."""
        return self.dense / self.sparse

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "speedup_range": list(self.speedup_range), "speedup": self.speedup}


def text(steps: Sequence[WholeStep]) -> str:
    """A table with a line for each recipe."""
    rows = [("whole step with the optimizer, predicted", "bytes a weight", "ms", "over dense", "range", "pays from")]
    rows.append(("dense, AdamW(fused=True)", f"{steps[0].dense_bytes:.1f}", f"{1e3 * steps[0].dense:.4g}", "", "", ""))
    for step in steps:
        low, high = step.speedup_range
        speeds = f"{step.speedup:.2f}x", f"{low:.2f}x to {high:.2f}x"
        rows.append((step.recipe or "its own rules", f"{step.sparse_bytes:.1f}", f"{1e3 * step.sparse:.4g}", *speeds, pays(step)))
    return "\n".join(aligned(rows))


def pays(step: WholeStep) -> str:
    """From how many tokens per update the step pays, in words."""
    if step.pays_from is None:
        return "never"
    return f"{rounded(step.pays_from):,} tokens per update" if step.pays_from > 1 else "any number of tokens"


def rounded(value: int) -> int:
    """Round up to two significant digits."""
    unit: int = 10 ** max(0, len(str(value)) - 2)
    return -(-value // unit) * unit


def predict(recipe: str, layers: Sequence[tuple[int, LayerCosts]], tokens: int, other: float) -> WholeStep | None:
    """The step of ``(times, costs)`` layers with ``tokens`` tokens in a pass, of which everything else takes ``other`` seconds forward.

    None if no layer is sparse in it.
    """
    sparse = [
        (times * costs.layer.shape[0] * costs.layer.shape[1], costs)
        for times, costs in layers
        if costs.sparse and (costs.rules.fprop or costs.rules.prepare)
    ]
    if not sparse or not all(costs.trains for _, costs in layers):
        return None
    weights = sum(count for count, _ in sparse)
    dense_bytes, sparse_bytes = (sum(count * costs.outside()[i] for count, costs in sparse) / weights for i in (0, 1))
    accumulate = layers[0][1].accumulate
    dense, used = _seconds(layers, other)
    bounds = [_seconds([(times, costs.at(bound)) for times, costs in layers], other) for bound in ("low", "high")]
    low, high = (slow / fast for slow, fast in bounds)
    least = _pays_from(layers, tokens, other)
    return WholeStep(recipe, dense_bytes, sparse_bytes, accumulate * dense, accumulate * used, (low, high), least)


def _seconds(layers: Sequence[tuple[int, LayerCosts]], other: float) -> tuple[float, float]:
    """Seconds of a step per forward pass, in the dense model and here."""
    every = [(times, total(costs.whole())) for times, costs in layers]
    dense, used = (3 * other + sum(times * seconds[i] for times, seconds in every) for i in (0, 1))
    return dense, used


def _pays_from(layers: Sequence[tuple[int, LayerCosts]], tokens: int, other: float) -> int | None:
    """The tokens of a step of one pass above which it is always faster than dense; None if it never is.

    With very few tokens sparse GEMMs read fewer bytes, so the condition may hold there as well: the search begins at the largest number.
    """

    def faster(count: int) -> bool:
        share = count / tokens
        some = [(times, costs.but(layer={"tokens": max(1, round(costs.layer.tokens * share))}, accumulate=1)) for times, costs in layers]
        dense, used = _seconds(some, other * share)
        return used < dense

    high = MOST_TOKENS
    if not faster(high):
        return None
    while high > 1 and faster(high // 2):
        high //= 2
    low = high // 2
    while high > EXACT * low + 1:
        middle = (low + high) // 2
        low, high = (low, middle) if faster(middle) else (middle, high)
    return high
