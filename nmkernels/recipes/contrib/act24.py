"""Activation 2:4: squared-ReLU activations are N:M sparse, weights stay dense."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

from ...autograd.activation import SplitRule
from ...nn.activation import ActivationRule, SquaredReLU, SquaredReLUMLP
from ...pattern import NMError, Pattern, RecipeError
from ..contract import About, Hooks, Setup, Stage, State, flag
from ..registry import recipe
from ..schedule import ScheduledRecipe, phases, resolve_step


@dataclass(frozen=True)
class ActivationStage(Stage):
    """A stage in which squared-ReLU activations follow ``activation``."""

    activation: ActivationRule | None = None


class Activations(Hooks):
    """Sets the rule of the model's ``SquaredReLU`` modules: that of the stage, and the former one when the recipe ends."""

    def begin(self) -> None:
        self.before = [(m, m.rule) for m in self.run.model.modules() if isinstance(m, SquaredReLU)]
        if not self.before:
            raise RecipeError(
                "sparsify_: the recipe makes squared-ReLU activations sparse, and the model has no nm.nn.SquaredReLU. Replace its "
                "activation by one, or by a SquaredReLUMLP, and train it so from the beginning; GPT takes "
                'activation="relu2", and the command line --activation relu2.'
            )
        m = self.recipe.pattern.m
        for name, module in self.run.model.named_modules():
            if isinstance(module, SquaredReLUMLP) and (size := module.fc.out_features) % m:
                raise RecipeError(f"sparsify_: the {size} hidden features of {name!r} are not a multiple of M={m}.")

    def enter(self, stage: Stage) -> None:
        self._use(stage.activation if isinstance(stage, ActivationStage) else None)

    def use_final_form(self) -> None:
        self._use(self.recipe.rule(split=False))

    def _use(self, rule: ActivationRule | None) -> None:
        for module, _ in self.before:
            module.rule = rule

    def close(self) -> None:
        for module, rule in self.before:
            module.rule = rule


@recipe("act24")
@dataclass(frozen=True)
class Activation24(ScheduledRecipe):
    """2:4 activations (Haziza et al., "Accelerating transformer inference and training with 2:4 activation sparsity", arXiv 2503.16672).

    For feed-forward blocks y₁ = x W₁ᵀ, a = relu²(y₁), y₂ = a W₂ᵀ. After a dense warm-up, with sp the N largest values of every M features::

        a = relu²(sp(y₁))

    Weights stay dense; the recipe acts on the model's ``nm.nn.SquaredReLU`` modules. ``finish`` leaves these in N:M mode, which no state
    dict holds: build the deployed model with ``SquaredReLU("2:4")``.

    Args:
        start: the step, or share of ``total_steps``, after which the dense warm-up is over; a tenth is our choice.
        gradient: ``"chain"`` ∂L/∂y₁ = 2 relu(sp(y₁)) ⊙ ∂L/∂a; ``"ste"`` 2 relu(y₁) ⊙ ∂L/∂a.
        split: also sparse weight gradients, in ``SquaredReLUMLP`` blocks: ∂L/∂W₂ = (∂L/∂y₂)ᵀ S(a), ∂L/∂W₁ = S(∂L/∂y₁)ᵀ x and
            ∂L/∂x = sp(∂L/∂y₁) W₁. S leaves the features with most non-zeros dense and keeps N of every M tokens of each other one.
        dense_features, multiple: the share of the features that S leaves dense; their number is rounded up to such a multiple.
        shuffle: S takes the tokens in a pseudo-random order.

    Raises:
        RecipeError: at ``sparsify_``, the model has no ``SquaredReLU``.

    Example:
        >>> recipe = Activation24("2:4", total_steps=1000)
        >>> [begin for begin, stage in recipe.stages], recipe.final
        ([0, 100], 'dense')
    """

    start: float | int = 0.1
    gradient: str = "chain"
    split: bool = flag(False)
    dense_features: float = 0.05
    multiple: int = 128
    shuffle: bool = flag(True)

    about = About(
        paper="Haziza et al., 2025, arXiv 2503.16672",
        patterns="2:4; any N:M",
        cost="a mask over each activation; the GEMM after it at N/M, which nm.flops does not count",
    )
    final = "dense"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule(split=True)

    def rule(self, split: bool) -> ActivationRule:
        """What the activations do, with or without split weight gradients."""
        p = Pattern(self.pattern)
        try:
            return ActivationRule(p, self.gradient, SplitRule(p, self.dense_features, self.multiple, self.shuffle) if split else None)
        except NMError as error:
            raise RecipeError(f"Activation24: {error}") from error

    @property
    def setup(self) -> Setup:
        return Setup(hooks=partial(Activations, self), linear_only="makes activations between linear layers sparse")

    @cached_property
    def stages(self) -> tuple[tuple[int, Stage], ...]:
        """Phase 0 dense, then phase 1 with sparse activations."""
        start = resolve_step("Activation24", "start", self.start, self.total_steps)
        if self.total_steps is not None:
            phases("Activation24", self.total_steps, self.start, 1.0)  # refuses a start that leaves no step
        dense = Stage(phase=0, not_ready="is still in its dense warm-up")
        return (0, dense), (start, ActivationStage(phase=1, activation=self.rule(self.split)))

    def stage(self, state: State) -> Stage:
        return super().stage(state or self.first_state({}))
