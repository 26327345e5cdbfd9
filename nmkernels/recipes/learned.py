"""What a recipe learns beside the weights, as optimizers see it, and the parameters that stand still meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ..nn import NMWeight
from ..pattern import RecipeError


def learned_apart(recipe: str, params: Iterable[Any], lr: float | Tensor, multiplier: float) -> list[dict[str, Any]]:
    """Parameter groups in which what the recipe learns stands apart, with ``multiplier`` times its group's learning rate.

    Args:
        params: as for any optimizer: parameters, (name, parameter) pairs, or groups of either.
        lr: of groups that have none of their own.

    Raises:
        RecipeError: nothing that ``sparsify_`` has added is among them.
    """
    given = list(params)
    groups: list[dict[str, Any]] = given if given and isinstance(given[0], dict) else [{"params": given}]
    result: list[dict[str, Any]] = []
    for group in groups:
        entries = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        apart = [entry for entry in entries if _is_learned(entry)]
        rest = [entry for entry in entries if not _is_learned(entry)]
        result += [{**group, "params": rest}] if rest else []
        result += [{**group, "params": apart, "lr": group.get("lr", lr) * multiplier}] if apart else []
    if not any(_is_learned(entry) for group in result for entry in group["params"]):
        raise RecipeError(
            f"{recipe}: the parameters hold nothing that the recipe learns. Call sparsify_ first, then "
            "recipe.optimizer(model.parameters()); for a copied or wrapped model give model.named_parameters()."
        )
    return result


def _is_learned(entry: Any) -> bool:
    name, p = entry if isinstance(entry, tuple) else ("", entry)
    return getattr(p, "nm_learned", False) or str(name).rpartition(".")[2].startswith("nm_")


class Standstill:
    """The parameters whose gradients are switched off while a recipe runs.

    Args:
        freezes: ``"all"`` but what is learned, ``"weights"`` of the swapped layers, or ``""`` for none.
    """

    def __init__(self, model: nn.Module, layers: dict[str, NMWeight], freezes: str) -> None:
        weights = {id(layer.weight) for layer in layers.values()}
        learned = {id(p) for layer in layers.values() for p in layer.learned().values()}
        self.params = [
            p
            for p in model.parameters()
            if p.requires_grad and (id(p) in weights if freezes == "weights" else freezes == "all" and id(p) not in learned)
        ]
        for p in self.params:
            p.requires_grad_(False)
            p.grad = None  # zeros left by zero_grad(set_to_none=False) would still be decayed

    def end(self) -> None:
        """Switch them on again."""
        for p in self.params:
            p.requires_grad_(True)
        self.params = []
