"""AST: the decay of pruned weights is annealed and goes past the momentum; and distillation from a dense teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from ...arguments import as_number
from ...autograd.transforms import WEIGHT, HardMask, KeptMask, masked, reading
from ...optim.annealed import AnnealedAdamW, AnnealedRule
from ...pattern import Pattern, RecipeError, ShapeError
from ..contract import About, Setup, Stage, State, choice, count, number
from ..registry import recipe
from ..schedule import ScheduledRecipe, left_of, resolve_step


@dataclass(frozen=True)
class AnnealedMask(KeptMask):
    """W̃ = M ⊙ W with M, ``nm_mask``, as last renewed; its penalty's gradient is λ (1 − M) ⊙ W, λ the schedule's ``nm_decay``."""

    reads = reading(nm_mask="held", nm_decay="fed")

    def renew(self, weight: Tensor, extras: Sequence[Tensor | None], generator: torch.Generator) -> dict[str, Tensor]:
        return {"nm_mask": super().kept(weight)}

    def kept(self, weight: Tensor, *extras: Tensor) -> Tensor:
        return extras[0]

    def penalty(self, weight: Tensor, *extras: Tensor) -> dict[str, Tensor]:
        mask, decay = extras
        return {WEIGHT: masked(weight, ~mask) * decay}


def distill_loss(student_logits: Tensor, teacher_logits: Tensor, labels: Tensor, temperature: float = 2.0, weight: float = 2 / 3) -> Tensor:
    """(1 − weight) · CE(student, labels) + weight · T² · KL(softmax(teacher/T) ‖ softmax(student/T)), both as means over tokens.

    As in Hinton et al., 2015; the defaults are AST's (arXiv 2407.20584). The teacher gets no gradient.

    Args:
        student_logits, teacher_logits: ``(..., classes)``, of one shape.
        labels: ``(...)``, whole numbers; −100 for tokens that count in neither term.
        temperature, weight: T > 0; that of the second term, 0 to 1.

    Raises:
        RecipeError: temperature or weight out of range.
        ShapeError: the shapes do not fit.

    Example:
        >>> logits, labels = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
        >>> torch.allclose(distill_loss(logits, logits, labels), F.cross_entropy(logits, labels) / 3)
        True
    """
    heat, share = as_number(temperature), as_number(weight)
    if heat is None or heat <= 0 or share is None or not 0 <= share <= 1:
        raise RecipeError(f"distill_loss: temperature={temperature!r} must be above 0 and weight={weight!r} between 0 and 1.")
    if student_logits.shape != teacher_logits.shape or student_logits.shape[:-1] != labels.shape:
        raise ShapeError(
            f"distill_loss: the student's logits {tuple(student_logits.shape)} and the teacher's {tuple(teacher_logits.shape)} must be of "
            f"one shape, and labels {tuple(labels.shape)} of theirs without the classes."
        )
    student, teacher = (x.reshape(-1, x.shape[-1]) for x in (student_logits, teacher_logits.detach()))
    labels = labels.reshape(-1)
    entropy = F.cross_entropy(student, labels, ignore_index=-100)
    divergence = F.kl_div(
        F.log_softmax(student / temperature, dim=-1), F.log_softmax(teacher / temperature, dim=-1), reduction="none", log_target=True
    ).sum(-1)
    counted = labels != -100
    mean = torch.where(counted, divergence, 0.0).sum() / counted.sum()
    return (1 - weight) * entropy + weight * temperature**2 * mean


@recipe("ast")
@dataclass(frozen=True)
class AST(ScheduledRecipe):
    """Adaptive Sparse Trainer (Huang et al., "Pruning large language models with semi-structural adaptive sparse training", AAAI 2025).

    Annealed SR-STE, to retrain a dense model: forward with M ⊙ W, M the mask of the N largest magnitudes as last renewed; the
    straight-through gradient g goes into the momentum alone, and the decay of pruned weights is added after it::

        λ_t = decay · min(t / T₀, 1),   t the applied steps so far
        u = m̂ + λ_t (1 − M) ⊙ W,   v of u²,   W ← W − lr (u / (√v̂ + ε) + wd · W)

    Needs ``AnnealedAdamW``, which ``recipe.optimizer`` builds. Distillation from the dense model is ``nm.recipes.distill_loss``; the
    paper's SLoRB is not here.

    Args:
        decay: λ at the end.
        end: T₀, in steps or as a share of ``total_steps``; 0 for λ from the start.
        every: steps between two renewals of the mask.
        second_moment: ``"total"`` takes v of u², in which the authors' code has m in place of m̂; ``"gradient"`` of (g + λ_t (1 − M) ⊙ W)².

    Example:
        >>> recipe = AST("2:4", total_steps=100)
        >>> [round(recipe.rate(torch.tensor(float(t))).item(), 7) for t in (0, 5, 25, 90)]
        [0.0, 1.2e-05, 6e-05, 6e-05]
    """

    decay: float = number(6e-5)
    end: float | int = 0.25
    every: int = count(10, least=1)
    second_moment: str = choice("total", "gradient")

    about = About(
        paper="Huang et al., AAAI 2025, arXiv 2407.20584",
        extra_state="a mask per layer",
        cost="mask search every 10 steps; the update in plain torch",
    )
    setup = Setup(optimizer=AnnealedAdamW, needs="adds its decay after the momentum")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rate(torch.zeros(()))

    def rate(self, t: Tensor) -> Tensor:
        """λ_t after ``t`` applied steps (float64), computed where t lies."""
        steps = resolve_step("AST", "end", self.end, self.total_steps)
        return self.decay * (t / steps).clamp(max=1.0) if steps else torch.full_like(t, self.decay)

    @cached_property
    def stages(self) -> tuple[tuple[int, Stage], ...]:
        """Always phase 1, the mask held between renewals."""
        rule = AnnealedRule(masked=True, second_moment=self.second_moment)
        return ((0, Stage(phase=1, transform=AnnealedMask(Pattern(self.pattern)), rule=rule, every=self.every)),)

    def stage(self, state: State) -> Stage:
        """Before an optimizer is attached the mask still follows the weight."""
        if not state:
            return Stage(phase=1, transform=HardMask(Pattern(self.pattern)))
        stage, steps = super().stage(state), resolve_step("AST", "end", self.end, self.total_steps)
        return replace(stage, not_ready="is still raising its decay") if left_of(state["t"], steps) else stage

    def values(self, state: State) -> dict[str, Tensor]:
        return {"decay": self.rate(state["t"])} if state else {}
