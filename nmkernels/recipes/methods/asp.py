"""ASP: prune once, keep the mask, retrain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...ops import STATS
from ...pattern import Pattern, RecipeError
from ..base import Observed, Recipe, Stage, State
from ..cost import Span, first
from ..masks import SCORES
from ..registry import recipe
from ..schedule import resolve_step
from ..search.channels import Search


@recipe("asp")
@dataclass(frozen=True)
class ASP(Recipe):
    """Automatic sparsity: dense → prune once → retrain with the mask held.

    Source: Mishra et al., "Accelerating sparse deep neural networks", 2021, arXiv 2104.08378. After pruning,
    around each step: g ← g ⊙ M, optimizer step, W ← W ⊙ M; momentum and weight decay cannot revive pruned weights. Works with any
    optimizer.

    Args:
        score: ``"magnitude"`` |w|; ``"wanda"`` |w|·‖x‖₂ of its input feature (Sun et al., ICLR 2024, eq. 1), after ``handle.calibrate()``;
            ``"existing"`` adopts the zeros of a model pruned elsewhere, and refuses weights that are not N:M.
        prune_at: when, in steps or as a share of ``total_steps``; 0 prunes as the optimizer is attached.
        permute: just before pruning, reorder hidden channels so that the mask keeps more: rows of the layers that write them and columns
            of the layers that read them, in one order, so that the model's function stays what it is up to rounding. Only chains of
            linear layers with nothing but elementwise operations between are touched (``nn.find_chains``); ``handle.report`` says what
            each layer gained or why it was left alone. Gradients and the optimizers' moments move along. Source: Pool and Yu, "Channel
            permutations for N:M sparsity", NeurIPS 2021; see ``search_permutation``. Scored as the mask is. On in NVIDIA's own ASP; off
            here, because it changes weights beside those that are pruned.
        escapes, seed: of that search.

    With an optimizer attached, ``finish`` before ``prune_at`` prunes in the given order; with none, ``finish`` itself does the search.

    Raises:
        RecipeError: unknown score; ``prune_at`` > 0 with a score other than magnitude, or a share without ``total_steps``; ``permute``
            with ``score="existing"``, whose zeros have their places already; negative ``escapes``.

    Example:
        >>> ASP("2:4", total_steps=100, prune_at=0.5).prune_step()
        50
    """

    paper = "Mishra et al., 2021, arXiv 2104.08378"
    patterns = "any N:M"
    extra_state = "a packed mask per layer, chosen once"
    cost = "gradients and weights are masked around each step; fprop at N/M once pruned"

    score: str = "magnitude"
    prune_at: float | int = 0
    permute: bool = False
    escapes: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.score not in SCORES:
            raise RecipeError(f"ASP: score={self.score!r} is unknown; choose one of {', '.join(SCORES)}.")
        if self.prune_step() and self.score != "magnitude":
            raise RecipeError(f'ASP: score="{self.score}" prunes a model that is trained already; prune_at={self.prune_at} must be 0.')
        if self.permute and self.score == "existing":
            raise RecipeError('ASP: score="existing" adopts zeros where they are; permute=True would move them out of their groups.')
        if not isinstance(self.escapes, int) or self.escapes < 0:
            raise RecipeError(f"ASP: escapes={self.escapes!r} must be a whole number of at least 0.")

    @property
    def search(self) -> Search | None:  # type: ignore[override]
        """How the channel orders are searched, None for not at all."""
        return Search(self.escapes, self.seed) if self.permute else None

    @property
    def mask_score(self) -> str:  # type: ignore[override]
        """How the held mask is scored."""
        return self.score

    def prune_step(self) -> int:
        """The number of dense steps before pruning."""
        return resolve_step("ASP", "prune_at", self.prune_at, self.total_steps) or 0

    def profile(self, steps: int) -> list[Span]:
        """Dense until ``prune_at``, then fprop at N/M."""
        return first(steps, [Span(self.prune_step()), Span(steps, fprop=Pattern(self.pattern).density)])

    def start(self, group: dict[str, Any]) -> State:
        """Dense until ``prune_at``, or pruned from the start."""
        return {"t": torch.zeros((), dtype=torch.float64), "pruned": self.prune_step() == 0}

    def stage(self, state: State) -> Stage:
        """Phase 0 dense, then phase 2 with the mask held."""
        return Stage(phase=2, fixed=True) if state.get("pruned") else Stage(phase=0)

    def advance(self, state: State, observed: Observed) -> bool:
        """Count applied steps; True at the one after which the weights are pruned."""
        if state["pruned"]:
            return False
        state["t"] = state["t"] + observed.stats[STATS.index("applied")].to(state["t"].device)
        if observed.calls < self.prune_step():
            return False  # the host need not wait for the device
        state["pruned"] = int(state["t"].item()) >= self.prune_step()
        return bool(state["pruned"])
