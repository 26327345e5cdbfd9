"""ASP: prune once, keep the mask, retrain."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...pattern import RecipeError
from ..base import About, Setup, Stage, choice, count
from ..masks import SCORES
from ..registry import recipe
from ..schedule import ScheduledRecipe, resolve_step


@recipe("asp")
@dataclass(frozen=True)
class ASP(ScheduledRecipe):
    """Automatic sparsity (Mishra et al., "Accelerating sparse deep neural networks", arXiv 2104.08378): prune once, then retrain.

    Around each step the mask is held: g ← g ⊙ M, optimizer step, W ← W ⊙ M.

    Args:
        score: ``"magnitude"`` |w|; ``"wanda"`` |w|·‖x‖₂ of its input feature (Sun et al., ICLR 2024, eq. 1), after ``handle.calibrate()``;
            ``"existing"`` adopts the zeros of a model pruned elsewhere, and refuses weights that are not N:M.
        start: when, in steps or as a share of ``total_steps``; 0 prunes as the optimizer is attached. With an optimizer, ``finish``
            before it prunes without ``permute``.
        permute: just before pruning, reorder hidden channels so that the mask keeps more of the score (``search_permutation``), with
            gradients and moments; the model's function is the same up to rounding. Only chains of linear layers with nothing but
            elementwise operations between are touched, and chains of convolutions with pooling and batch norms too
            (``nn.find_chains``); ``handle.report`` says what each gained, or why it is pruned in the order that it has.
        escapes, seed: of that search.

    Raises:
        RecipeError: ``start`` > 0 with a score other than magnitude, or a share without ``total_steps``; ``permute`` with existing zeros.

    Example:
        >>> [(begin, stage.phase) for begin, stage in ASP("2:4", total_steps=100, start=0.5).stages]
        [(0, 0), (50, 2)]
    """

    score: str = choice(*SCORES)
    start: float | int = 0
    permute: bool = False
    escapes: int = count(100)
    seed: int = 0

    about = About(
        paper="Mishra et al., 2021, arXiv 2104.08378",
        extra_state="a mask per layer, chosen once",
        cost="gradients and weights are masked around each step; fprop at N/M once pruned",
    )
    _resume = "any"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stages[1][0] and self.score != "magnitude":
            raise RecipeError(f'ASP: score="{self.score}" prunes a model that is trained already; start={self.start} must be 0.')
        if self.permute and self.score == "existing":
            raise RecipeError('ASP: score="existing" adopts zeros where they are; permute=True would move them out of their groups.')

    @property
    def setup(self) -> Setup:
        search = {"escapes": self.escapes, "seed": self.seed} if self.permute else None
        whole = "reorders the channels of whole weights" if self.permute else ""
        if self.score == "wanda":
            whole = "ranks weights by all inputs that their layers have seen"
        only = "ranks weights by what linear layers have seen" if self.score == "wanda" else ""
        return Setup(mask_score=self.score, channels=search, needs_whole=whole, linear_only=only)

    @cached_property
    def stages(self) -> tuple[tuple[int, Stage], ...]:
        """Phase 0 dense, then phase 2 with the mask held."""
        start = resolve_step("ASP", "start", self.start, self.total_steps) or 0
        return (0, Stage(phase=0)), (start, Stage(phase=2, held_mask=True))
