"""The squared-ReLU activations of a model, for recipes that make those sparse."""

from __future__ import annotations

from torch import nn

from ..nn import ActivationRule, SquaredReLU, SquaredReLUMLP
from ..pattern import RecipeError


class Activations:
    """The ``SquaredReLU`` modules that a recipe governs, and the rule that each had before.

    Args:
        final: the rule that the recipe leaves; None for recipes that leave activations alone, which then govern none.

    Raises:
        RecipeError: there are none to govern, one is used where no features of that number can be N:M, or a split has no MLP to act on.
    """

    def __init__(self, model: nn.Module, final: ActivationRule | None) -> None:
        found = {} if final is None else {name: m for name, m in model.named_modules() if isinstance(m, SquaredReLU)}
        self.before = [(module, module.rule) for module in found.values()]
        self.final = final
        if final is None:
            return
        if not found:
            raise RecipeError(
                "sparsify_: the recipe makes squared-ReLU activations sparse, and the model has no nm.nn.SquaredReLU. Put one, or a "
                'SquaredReLUMLP, in place of its activation and train it so from the beginning; GPT takes activation="relu2", and the '
                "command line --activation relu2."
            )
        for name, module in model.named_modules():
            if isinstance(module, SquaredReLUMLP) and module.fc.out_features % final.pattern.m:
                size = module.fc.out_features
                raise RecipeError(f"sparsify_: the {size} hidden features of {name!r} are not a multiple of M={final.pattern.m}.")

    def use(self, rule: ActivationRule | None) -> None:
        """From now on all governed modules follow ``rule``; None for the dense form."""
        for module, _ in self.before:
            module.rule = rule

    def finish(self) -> None:
        """Leave the modules in their final form."""
        self.use(self.final)

    def restore(self) -> None:
        """Give every governed module the rule that it had before the recipe."""
        for module, rule in self.before:
            module.rule = rule
