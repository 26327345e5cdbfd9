"""LBC: scores of all combinations are learned, and the worst are removed until one is left in each group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from ...autograd.transforms import CombinationMask, Traits, WeightTransform, combination_count, masked, reading, wide
from ...optim.rules import UpdateRule
from ...pattern import Pattern, RecipeError
from ..contract import About, Hooks, Setup, Stage, State, choice, number
from ..registry import recipe
from ..schedule import ScheduledRecipe, passed, resolve_step


@dataclass(frozen=True)
class CandidateMask(CombinationMask):
    """W̃ = W ⊙ B with ``LBC``'s B, and its options; ``nm_scores`` ``(groups, C)`` are α, ``nm_alive``, bool, which of them remain.

    ``nm_combinations`` of ``most``, the C of the recipe's pattern, remain; a layer of another pattern keeps as large a part of its own.
    """

    forward: str = "union"
    chain: bool = True
    most: int = 0

    reads = reading(nm_scores="learned", nm_alive="held", nm_combinations="fed")

    def _traits(self) -> Traits:
        return replace(super()._traits(), is_nm=self.forward == "top_n" or self.reads["nm_scores"] == "fixed")

    def start(self, weight: Tensor) -> dict[str, Tensor]:
        shape = weight.numel() // self.pattern.m, combination_count(self.pattern)
        first, dtype = 1.0 / math.comb(self.pattern.m - 1, self.pattern.n - 1), torch.promote_types(weight.dtype, torch.float32)
        return {"nm_scores": torch.full(shape, first, dtype=dtype, device=weight.device)}

    def renew(self, weight: Tensor, extras: Sequence[Tensor | None], generator: torch.Generator) -> dict[str, Tensor]:
        """Of what remained, the largest scores of each group, as many as remain; of equal ones the first stay."""
        scores, alive, remaining = extras
        assert scores is not None
        if alive is None or remaining is None:
            return {"nm_alive": torch.ones_like(scores, dtype=torch.bool)}
        remaining = 1 + ((scores.shape[1] - 1) * (remaining - 1) / max(1, self.most - 1)).ceil()
        order = scores.detach().masked_fill(~alive, -math.inf).argsort(dim=1, descending=True, stable=True)
        return {"nm_alive": alive & (order.argsort(dim=1) < remaining)}

    def kept(self, weight: Tensor, *extras: Tensor) -> Tensor:
        scores, alive, _ = extras
        if self.forward == "union":
            choices = alive.to(torch.float32)
            return (choices @ self.table(choices) > 0).reshape(weight.shape)
        left = wide(scores) * alive
        soft = left @ self.table(left)
        # the op ranks magnitudes; scores are ranked with their sign
        raised = soft - soft.amin(1, keepdim=True)
        return torch.ops.nmkernels.nm_mask(raised, self.pattern.n, self.pattern.m).reshape(weight.shape)

    def gradient(self, g: Tensor, weight: Tensor, *extras: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        dw = masked(g, self.kept(weight, *extras)) if self.chain else g
        if self.reads["nm_scores"] != "learned":
            return dw, {}
        scores, alive, _ = extras
        d = (self.grouped(g) * self.grouped(weight)).to(scores.dtype)
        return dw, {"nm_scores": (d @ self.table(scores).t()).masked_fill(~alive, 0.0)}


@dataclass(frozen=True)
class BestCandidate(CandidateMask):
    """W̃ = W ⊙ P_k with k the largest score among the remaining candidates: what LBC deploys, and trains once only one remains."""

    reads = reading(nm_scores="fixed", nm_alive="held", nm_combinations="fed")

    def start(self, weight: Tensor) -> dict[str, Tensor]:
        return {}

    def kept(self, weight: Tensor, *extras: Tensor) -> Tensor:
        scores, alive, _ = extras
        return self.best(wide(scores).masked_fill(~alive, -math.inf), weight)


class Removal(Hooks):
    """Removes combinations when a stage begins that has fewer; in a stage that is resumed the same ones remain."""

    def enter(self, stage: Stage) -> None:
        self.run.renew_held()


@recipe("lbc")
@dataclass(frozen=True)
class LBC(ScheduledRecipe):
    """Learning Best Combination (Zhang et al., "Learning best combination for efficient N:M sparsity", NeurIPS 2022, arXiv 2206.06662).

    Each group has a score α_k for each of its C = C(M, N) combinations P_k, at first 1 / C(M−1, N−1). Weights and scores are trained
    together, and the combinations of the smallest scores are removed for good::

        S = Σ_k α_k P_k  over the remaining k;   W̃ = W ⊙ B,  B = S / S, so 1 where any remaining combination has the weight
        ∂L/∂W = g ⊙ B,   ∂L/∂S := g ⊙ W  (straight through B),   ∂L/∂α_k = ⟨∂L/∂S, P_k⟩
        remaining(t) = 1 + ⌈(C − 1) (1 − (t − t_i)/(t_f − t_i))³⌉

    So training begins dense, and from t_f on the one combination left is a fixed mask. ``finish`` leaves W ⊙ P_k. α is the Parameter
    ``nm_scores`` ``(groups, C)`` of each layer.

    Args:
        start, end: t_i and t_f, in steps or as shares of ``total_steps``.
        exponent: of the schedule.
        forward: ``"union"`` as above; ``"top_n"``, not the authors': B is 1 at the N largest S of each group, N:M from the first step on.
        gradient: ``"chain"`` ∂L/∂W = g ⊙ B; ``"ste"`` g itself.

    Raises:
        PatternError: more than 256 combinations.

    Example:
        >>> recipe = LBC("2:4", total_steps=100)
        >>> [recipe.remaining(t) for t in (0, 4, 10, 20, 30, 49, 50)]
        [6, 5, 4, 3, 2, 2, 1]
    """

    start: float | int = 0
    end: float | int = 0.5
    exponent: float = number(3.0, above=True)
    forward: str = choice("union", "top_n")
    gradient: str = choice("chain", "ste")

    about = About(
        paper="Zhang et al., NeurIPS 2022, arXiv 2206.06662",
        patterns="any N:M of at most 256 combinations",
        extra_state="C(M, N) scores per group, their moments, and a bit each",
        cost="dense steps first; C(M, N) scores per group",
    )

    def remaining(self, t: int) -> int:
        """How many combinations of each group remain after ``t`` applied steps."""
        return len(self.stages) - passed(t, self.stages)

    @property
    def setup(self) -> Setup:
        reason, only = "learns scores for each whole weight", "learns scores for the weights of linear layers"
        return Setup(hooks=partial(Removal, self), needs_whole=reason, linear_only=only)

    @cached_property
    def stages(self) -> tuple[tuple[int, Stage], ...]:
        """Phase 1 while combinations are removed, each with its own; phase 2 with the one that is left."""
        start, end = (resolve_step("LBC", key, getattr(self, key), self.total_steps) for key in ("start", "end"))
        if end <= start:
            raise RecipeError(f"LBC: end ({end} steps) must come after start ({start} steps).")
        rule, p = UpdateRule(masked=True), Pattern(self.pattern)
        count = combination_count(p)
        shares = [((left - 1) / (count - 1)) ** (1.0 / self.exponent) for left in range(count - 1, 0, -1)]
        # a removal that falls on a whole step exactly must not slip to the next by rounding
        begins = (0, *(start + math.ceil((end - start) * (1.0 - share) - 1e-9) for share in shares))
        stage = Stage(phase=1, transform=CandidateMask(p, forward=self.forward, chain=self.gradient == "chain", most=count), rule=rule)
        if count == 1:
            return ((0, stage),)
        removing = [replace(stage, not_ready=f"still has {left} combinations in each group") for left in range(count, 1, -1)]
        fixed = Stage(phase=2, transform=self.final_transform(), rule=rule)
        return tuple(zip(begins, [*removing, fixed], strict=True))

    def values(self, state: State) -> dict[str, Tensor]:
        return {"combinations": torch.tensor(float(len(self.stages) - state.get("stage", 0)), dtype=torch.float32)}

    def final_transform(self) -> WeightTransform:
        p = Pattern(self.pattern)
        return BestCandidate(p, chain=self.gradient == "chain", most=combination_count(p))
