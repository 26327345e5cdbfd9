"""ProxSparse: the mask is learned by a regulariser that is zero for 2:4 groups alone; the weights are left as they were."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..autograd import Anchored, AnchoredMask, HardMask, WeightTransform
from ..optim import UpdateRule
from ..pattern import Pattern, RecipeError
from .base import Recipe, Stage, State
from .cost import Span
from .proximal import prox
from .registry import recipe
from .schedule import check_choice


@recipe("proxsparse")
@dataclass(frozen=True)
class ProxSparse(Recipe):
    """ProxSparse (Liu et al., "ProxSparse: regularized learning of semi-structured sparsity masks for pretrained LLMs", ICML 2025).

    Dense forward passes. After each optimizer step every group of four becomes argmin ½‖w − W‖² + λ₁ Σ |w_i w_j w_k| over its four
    triples: zero for any two non-zeros, and never a change of sign or order (``nmkernels.recipes.prox``). With ``anchor``, the gradient
    of λ₂ ‖W / (W₀ + ε sgn W₀) ⊙ (W − W₀)‖² is added to the loss's, after unscaling, accumulation and clipping, once per step; the
    authors put the term into the loss, before the clipping. ``finish`` leaves M(W) ⊙ W₀: training learns the mask and nothing else,
    for which a few hundred steps on a trained model are meant.

    2:4 only: the operator is known for no other pattern. W₀ is taken by ``sparsify_`` and again by ``attach``, and is the buffer
    ``nm_initial`` of each layer in the model's state dict until ``finish`` or ``remove``; a state dict without it, a dense checkpoint,
    loads strictly and renews it. λ₁ acts relative to 1/|w|² of the weights and does not carry over between models: watch ``density``
    fall from 1 towards 1/2. The equations are those of the authors' code; of the paper only the opening was read. Works with any
    optimizer.

    Args:
        strength: λ₁; 0.25 for Llama-2-7B, 0.85 for Llama-3.1-8B in the authors' scripts, with AdamW at lr 1e-4 and 5e-5.
        scale_by_lr: λ₁ · lr instead of λ₁ in each step, as a proximal gradient method would have it; the authors' code has λ₁ whatever
            the rate's warm-up and decay do, which is the default.
        anchor: λ₂; 1.0 for Llama-3.1-8B, 0 for most.
        epsilon: ε; 0.1 there.
        values: ``"initial"`` leaves M(W) ⊙ W₀ in the end, as the authors do; ``"trained"`` M(W) ⊙ W.

    Raises:
        RecipeError: a pattern other than 2:4, or a value out of range.

    Example:
        >>> import torch
        >>> recipe = ProxSparse(strength=1.0)
        >>> recipe.settle({}, torch.tensor([[3.0, -0.1, 2.0, 0.2]]), lr=1e-3)
        tensor([[3., 0., 2., 0.]])
    """

    strength: float = 0.25
    scale_by_lr: bool = False
    anchor: float = 0.0
    epsilon: float = 0.1
    values: str = "initial"

    paper: ClassVar[str] = "Liu et al., ICML 2025, arXiv 2502.00258"
    patterns: ClassVar[str] = "2:4"
    extra_state: ClassVar[str] = "the initial weights"
    cost: ClassVar[str] = "dense products, a proximal step of every group"

    def __post_init__(self) -> None:
        super().__post_init__()
        if Pattern(self.pattern) != Pattern("2:4"):
            raise RecipeError(f"ProxSparse: its regulariser and proximal operator are for 2:4, not {self.pattern}; use another recipe.")
        check_choice("ProxSparse", "values", self.values, ("initial", "trained"))
        if not isinstance(self.scale_by_lr, bool):
            raise RecipeError(f"ProxSparse: scale_by_lr={self.scale_by_lr!r} must be True or False.")
        for name in ("strength", "anchor", "epsilon"):
            value = getattr(self, name)
            if isinstance(value, bool) or not 0 <= value < math.inf:
                raise RecipeError(f"ProxSparse: {name}={value!r} must be a finite number of at least 0.")
        if self.anchor and not self.epsilon:
            raise RecipeError("ProxSparse: epsilon=0 divides by initial weights that are zero; give a positive one.")

    def stage(self, state: State) -> Stage:
        """Always phase 1: dense, its mask only watched for flips."""
        p = Pattern(self.pattern)
        transform = Anchored(p, self.anchor, self.epsilon) if self.anchor else WeightTransform(p)
        return Stage(phase=1, transform=transform, rule=UpdateRule(masked=True))

    def settle(self, state: State, weight: Tensor, lr: float | Tensor) -> Tensor:
        """The proximal step."""
        return prox(weight, self.strength * lr if self.scale_by_lr else self.strength)

    def final_transform(self) -> WeightTransform:
        """M(W) ⊙ W₀, or M(W) ⊙ W."""
        p = Pattern(self.pattern)
        return AnchoredMask(p) if self.values == "initial" else HardMask(p)

    def fit(self, transform: WeightTransform, pattern: Pattern, shape: tuple[int, int]) -> WeightTransform:
        """Unchanged; a layer of another pattern is refused."""
        if pattern != self.pattern:
            raise RecipeError(f"ProxSparse: a layer is to be {pattern}, and its proximal operator is for 2:4; leave the layer out.")
        return transform

    def profile(self, steps: int) -> list[Span]:
        """Dense throughout."""
        return [Span(steps)]
