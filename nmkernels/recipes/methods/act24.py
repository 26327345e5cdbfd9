"""Activation 2:4: squared-ReLU activations are N:M sparse, weights stay dense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...autograd import SplitRule
from ...nn import ActivationRule
from ...pattern import NMError, Pattern, RecipeError
from ..base import Observed, Recipe, Stage, State
from ..registry import recipe
from ..schedule import advance, check_same_schedule, passed, phases, resolve_step


@recipe("act24")
@dataclass(frozen=True)
class Activation24(Recipe):
    """2:4 activations (Haziza et al., "Accelerating transformer inference and training with 2:4 activation sparsity", arXiv 2503.16672).

    For feed-forward blocks y₁ = x W₁ᵀ, a = relu²(y₁), y₂ = a W₂ᵀ with squared ReLU, whose activations are mostly zero anyway. After a
    dense warm-up, with sp the N largest values of every M features::

        a = relu²(sp(y₁))

    Nothing else changes: weights are dense and stay so, and every linear layer trains as usual. The recipe acts on the
    ``nm.nn.SquaredReLU`` modules of the model. ``finish`` gives the dense model back with these modules in N:M mode, which is what was
    trained; that mode is no part of a state dict, so build the deployed model with ``SquaredReLU("2:4")`` (for ``models.GPT``
    ``activation="relu2:2:4"``). ``remove`` gives the modules back as they were. Of ``handle.metrics()``, flips and density are those of
    the weights: 0 and 1; ``nm.flops`` counts sparse weights and gradients only, and so none of this.

    2:4 is the paper's. Works with any optimizer.

    Args:
        dense: length of the dense warm-up, in steps or as a share of ``total_steps``. The paper has one, of a length that could not be had;
            a tenth is our choice.
        grad: ``"chain"`` ∂L/∂y₁ = 2 relu(sp(y₁)) ⊙ ∂L/∂a, the derivative; ``"ste"`` 2 relu(y₁) ⊙ ∂L/∂a, straight through what sp dropped.
            Which of the two the authors take could not be had: their ∂L/∂x = sp(∂L/∂y₁) W₁ has a use under ``"ste"`` only.
        split: also sparse weight gradients, in ``SquaredReLUMLP`` blocks::

                ∂L/∂W₂ = (∂L/∂y₂)ᵀ S(a)      ∂L/∂W₁ = S(∂L/∂y₁)ᵀ x      ∂L/∂x = sp(∂L/∂y₁) W₁

            S leaves the features with most non-zeros dense and keeps the N largest magnitudes of every M tokens of each other one.
        dense_features: share of the features that S leaves dense; 5 % in the paper.
        multiple: their number is rounded up to a multiple of this; 128 in the paper, which does not tell in which direction.
        shuffle: S takes the tokens in a pseudo-random order, so that neighbours fall into different groups. The paper permutes at random;
            here the order is fixed by the number of tokens, so that runs can be repeated and resumed.

    Raises:
        RecipeError: ``dense`` is a share without ``total_steps`` or leaves no sparse step, or an option is out of range; at ``sparsify_``,
            the model has no ``SquaredReLU``.

    Example:
        >>> recipe = Activation24("2:4", total_steps=1000)
        >>> recipe.warm_up(), recipe.final
        (100, 'dense')
    """

    dense: float | int = 0.1
    grad: str = "chain"
    split: bool = False
    dense_features: float = 0.05
    multiple: int = 128
    shuffle: bool = True

    paper = "Haziza et al., 2025, arXiv 2503.16672"
    patterns = "2:4; any N:M"
    extra_state = "none"
    cost = "a mask over each activation; the product after it at N/M, which nm.flops does not count"
    final = "dense"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.split, bool):
            raise RecipeError(f"Activation24: split={self.split!r} must be True or False.")
        try:
            self._rule(split=True)
        except NMError as error:
            raise RecipeError(f"Activation24: {error}") from error
        self.warm_up()

    def warm_up(self) -> int:
        """The dense steps."""
        if self.total_steps is None:
            return resolve_step("Activation24", "dense", self.dense, None) or 0
        return phases("Activation24", self.total_steps, self.dense, 0).start

    def _rule(self, split: bool) -> ActivationRule:
        p = Pattern(self.pattern)
        rule = SplitRule(p, self.dense_features, self.multiple, self.shuffle) if split else None
        return ActivationRule(p, self.grad, rule)

    def final_activation(self) -> ActivationRule:
        """N:M in forward; weight gradients as always, should training go on."""
        return self._rule(split=False)

    def start(self, group: dict[str, Any]) -> State:
        """No step taken."""
        return {"t": torch.zeros((), dtype=torch.float64), "stage": passed(0, (self.warm_up(),))}

    def check_state(self, state: Any, group: dict[str, Any]) -> None:
        """Also refuse to go on under another schedule."""
        super().check_state(state, group)
        check_same_schedule(state["spec"], self.spec())

    def stage(self, state: State) -> Stage:
        """Phase 0 dense, then phase 1 with sparse activations."""
        if not state.get("stage", passed(0, (self.warm_up(),))):
            return Stage(phase=0)
        return Stage(phase=1, activation=self._rule(self.split))

    def advance(self, state: State, observed: Observed) -> bool:
        """Count applied steps; True when the warm-up ends."""
        return advance(state, observed, (self.warm_up(),))

    def unready(self, state: State) -> str:
        """Too early in the warm-up."""
        return "is still in its dense warm-up" if self.stage(state).phase == 0 else ""
