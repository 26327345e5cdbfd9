"""Bi-Mask: one N:M mask for the forward pass and another, along the outputs, for the gradient of the input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...autograd import HardMask
from ...autograd.transforms import Kind, pruned_along_out
from ...optim import UpdateRule
from ...pattern import Pattern
from ..base import About, Recipe, Setup, Stage, State
from ..registry import recipe
from ..schedule import check_choice, check_count, check_number, check_seed

CRITERIA = ("magnitude", "count")
"""What Bi-Mask's best permutation retains most of: Σ|w|, or the number of non-zeros."""


@dataclass(frozen=True)
class BiMasked(HardMask):
    """Bi-Mask (Zhang et al., ICML 2023): W̃ = W ⊙ b_f forward and W ⊙ b_b in ∂L/∂x, both N:M along what their GEMM sums over.

    b_f is the mask M(W) by rows. b_b keeps, of W ⊙ b_f with its rows in the order ``nm_order``, the N largest magnitudes of every M
    consecutive rows of a column, so that b_b ⊆ b_f. The order, which decides how much of W ⊙ b_f is lost, is held: the best of
    ``draws`` random permutations when it was renewed. The masks follow the weight at every step.

    Args:
        pattern, chain: as for ``HardMask``.
        draws: number of permutations to choose from; 0 keeps the rows in their own order.
        criterion: see ``CRITERIA``.

    Example:
        >>> w = torch.tensor([[3.0, 0.0], [2.0, 0.0], [0.0, 1.0]])
        >>> BiMasked(Pattern("1:2")).for_dgrad(w, torch.tensor([0, 2, 1]))
        tensor([[3., 0.],
                [2., 0.],
                [0., 1.]])
    """

    draws: int = 100
    criterion: str = "magnitude"

    reads: ClassVar[Mapping[str, Kind]] = {"nm_order": "held"}

    def renew(self, weight: Tensor, extras: Sequence[Tensor | None], generator: torch.Generator) -> dict[str, Tensor]:
        """``nm_order``, int64 ``(out,)``: the first of the best of ``draws`` random permutations of the rows."""
        rows = weight.shape[0]
        if self.draws == 0:
            return {"nm_order": torch.arange(rows, device=weight.device)}
        sizes = torch.ops.nmkernels.nm_prune(weight, self.pattern.n, self.pattern.m).abs()
        orders = [torch.randperm(rows, generator=generator).to(weight.device) for _ in range(self.draws)]
        scores = torch.stack([self._retained(sizes[order]) for order in orders]).tolist()
        return {"nm_order": orders[scores.index(max(scores))]}

    def _retained(self, permuted: Tensor) -> Tensor:
        left = pruned_along_out(permuted, self.pattern.n, self.pattern.m)
        return left.sum(dtype=torch.float64) if self.criterion == "magnitude" else left.count_nonzero().double()

    def for_dgrad(self, used: Tensor, *extras: Tensor) -> Tensor:
        (order,) = extras
        result = torch.empty_like(used)
        result[order] = pruned_along_out(used[order], self.pattern.n, self.pattern.m)
        return result


@recipe("bimask")
@dataclass(frozen=True)
class BiMask(Recipe):
    """Bi-Mask (Zhang et al., "Bi-directional masks for efficient N:M sparse training", ICML 2023).

    Two masks of the present weight, at every step: b_f, N:M along the inputs, and b_b, N:M along the outputs, so that both GEMMs that
    multiply the weight are sparse::

        y = x (W ⊙ b_f)ᵀ        ∂L/∂x = g (W ⊙ b_b)        ∂L/∂W := gᵀ x + λ (1 − b_f) ⊙ W

    b_b ⊆ b_f keeps the N largest magnitudes of W ⊙ b_f in every M rows of a column, where the rows are taken in a permuted order: the
    best of ``draws`` random permutations, chosen anew every ``every`` applied steps and held in between, also by a checkpoint. The
    decay is added as SR-STE's, after unscaling, accumulation and clipping; the authors' code adds it in each backward pass. Where M does
    not divide the number of outputs, the last group is short and keeps N of its fewer rows. Works with any optimizer. ``finish`` leaves
    W ⊙ b_f.

    Choosing a permutation costs ``draws`` masks.

    Args:
        decay: λ, at least 0.
        draws: permutations to choose from; 0 takes the rows in their own order and chooses nothing.
        every: applied steps between two choices; 0 chooses once, at the beginning.
        criterion: what the best permutation retains most of: ``"magnitude"`` Σ|W ⊙ b_b|, by which b_b itself is chosen; ``"count"`` the
            number of non-zeros of b_b, as in the authors' code.
        seed: of the permutations, the same on every data-parallel rank; None takes torch's initial seed.

    Raises:
        RecipeError: a value is out of range.

    Example:
        >>> stage = BiMask("2:4", draws=10).stage({"seed": 0})
        >>> stage.transform.draws, stage.every, stage.rule.decay
        (10, 100, 0.0002)
    """

    decay: float = 2e-4
    draws: int = 100
    every: int = 100
    criterion: str = "magnitude"
    seed: int | None = None

    about = About(
        paper="Zhang et al., ICML 2023, arXiv 2302.06058",
        extra_state="a permutation of the outputs per layer",
        cost="fprop and dgrad at N/M; 100 masks per layer every 100 steps",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("BiMask", "decay", self.decay)
        check_choice("BiMask", "criterion", self.criterion, CRITERIA)
        check_count("BiMask", "draws", self.draws)
        check_count("BiMask", "every", self.every)
        check_seed("BiMask", self.seed)

    @property
    def setup(self) -> Setup:
        return Setup(draws=True, seed=self.seed)

    def stage(self, state: State) -> Stage:
        """Always phase 1, with both masks and the decay; before an optimizer is attached no permutation is looked for."""
        transform = BiMasked(Pattern(self.pattern), draws=self.draws if state else 0, criterion=self.criterion)
        return Stage(phase=1, transform=transform, rule=UpdateRule(masked=True, decay=self.decay), every=self.every)
