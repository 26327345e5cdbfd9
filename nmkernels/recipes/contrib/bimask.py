"""Bi-Mask: one N:M mask for the forward pass and another, along the outputs, for the gradient of the input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...autograd.transforms import HardMask, pruned_along_out, reading
from ...optim.rules import UpdateRule
from ...pattern import Pattern
from ..contract import About, Recipe, Setup, Stage, State, choice, count, number, random_seed
from ..registry import recipe


@dataclass(frozen=True)
class BiMasked(HardMask):
    """W̃ = W ⊙ b_f forward and W ⊙ b_b in ∂L/∂x, as ``BiMask`` has them, with the rows taken for b_b in the held order ``nm_order``."""

    draws: int = 100
    criterion: str = "magnitude"

    reads = reading(nm_order="held")

    def renew(self, weight: Tensor, extras: Sequence[Tensor | None], generator: torch.Generator) -> dict[str, Tensor]:
        rows = weight.shape[0]
        if self.draws == 0:
            return {"nm_order": torch.arange(rows, device=weight.device)}
        sizes = torch.ops.nmkernels.nm_prune(weight, self.pattern.n, self.pattern.m).abs()
        orders, scores = [torch.randperm(rows, generator=generator).to(weight.device) for _ in range(self.draws)], []
        for order in orders:
            left = pruned_along_out(sizes[order], self.pattern.n, self.pattern.m)
            scores.append(left.sum(dtype=torch.float64) if self.criterion == "magnitude" else left.count_nonzero().double())
        return {"nm_order": orders[int(torch.stack(scores).argmax())]}

    def for_dgrad(self, used: Tensor, *extras: Tensor) -> Tensor:
        order, result = extras[0], torch.empty_like(used)
        result[order] = pruned_along_out(used[order], self.pattern.n, self.pattern.m)
        return result


@recipe("bimask")
@dataclass(frozen=True)
class BiMask(Recipe):
    """Bi-Mask (Zhang et al., "Bi-directional masks for efficient N:M sparse training", ICML 2023, arXiv 2302.06058).

    Two masks of the present weight, at every step: b_f, N:M along the inputs, and b_b, N:M along the outputs, so that both GEMMs that
    multiply the weight are sparse::

        y = x (W ⊙ b_f)ᵀ        ∂L/∂x = g (W ⊙ b_b)        ∂L/∂W := gᵀ x + λ (1 − b_f) ⊙ W

    b_b ⊆ b_f keeps the N largest magnitudes of W ⊙ b_f in every M rows of a column, with the rows in a permuted order that is held between
    two choices. A last group of fewer than M rows keeps N too. ``finish`` leaves W ⊙ b_f.

    Args:
        decay: λ, at least 0, added as SR-STE's.
        draws: random permutations to choose from; 0 takes the rows in their own order.
        every: applied steps between two choices; 0 chooses once, at the beginning.
        criterion: what the best permutation retains most of: ``"magnitude"`` Σ|W ⊙ b_b|; ``"count"``, the authors', non-zeros of b_b.
        seed: of the permutations, the same on every data-parallel rank; None takes torch's initial seed.

    Example:
        >>> stage = BiMask("2:4", draws=10).stage({"seed": 0})
        >>> stage.transform.draws, stage.every, stage.rule.decay
        (10, 100, 0.0002)
    """

    decay: float = number(2e-4)
    draws: int = count(100)
    every: int = count(100)
    criterion: str = choice("magnitude", "count")
    seed: int | None = random_seed()

    about = About(
        paper="Zhang et al., ICML 2023, arXiv 2302.06058",
        extra_state="a permutation of the outputs per layer",
        cost="fprop and dgrad at N/M; 100 masks per layer every 100 steps",
    )

    @property
    def setup(self) -> Setup:
        only = "gives the gradient of a linear layer's input another mask than its output"
        return Setup(draws=True, seed=self.seed, needs_whole="orders the rows of each whole weight", linear_only=only)

    def stage(self, state: State) -> Stage:
        """Before an optimizer is attached no permutation is searched for."""
        transform = BiMasked(Pattern(self.pattern), draws=self.draws if state else 0, criterion=self.criterion)
        return Stage(phase=1, transform=transform, rule=UpdateRule(masked=True, decay=self.decay), every=self.every)
