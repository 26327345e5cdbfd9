"""sparsify_: swap a model's linear layers for sparse ones in place, and get the handle that drives the recipe."""

from __future__ import annotations

from torch import nn

from ..nn import NMWeight, make_sparse_, switch_fast_paths
from ..pattern import Pattern, RecipeError
from .base import Recipe
from .handle import Handle
from .registry import resolve
from .select import FilterFn, select
from .swap import densify_


def sparsify_(model: nn.Module, recipe: Recipe | str, filter_fn: FilterFn | None = None) -> Handle:
    """Turn the linear layers of ``model`` into sparse ones, in place, and return the handle that drives the recipe.

    Module and Parameter objects, hooks, dtype, device and mode are kept, and ``state_dict`` keys stay those of the dense model, so
    optimizers may be built before or after. Taken are ``nn.Linear`` and Hugging Face's ``Conv1D``; left dense are tied weights, output
    heads, layers that M does not divide, tiny ones, quantised ones, what a parent bypasses, and all that is no linear layer;
    ``print(handle.report)`` shows every layer that has a weight and why.

    A copy of the model (an EMA) keeps the phase it was copied in: to evaluate it, load its state dict into ``model``. Change weights
    under ``torch.no_grad()``; what is written through ``weight.data`` is not seen before the next optimizer step.

    Args:
        model: any module; its own class is not changed.
        recipe: a recipe, or its name such as ``"srste:2:4"``.
        filter_fn: ``filter_fn(module, name) -> bool`` chooses among the linear layers instead of the default rules.

    Raises:
        RecipeError: no layer can be made sparse, the model is sparse already, the filter chose an impossible layer, or a layer's
            weight is of no use to the recipe (S-STE has no scale for zeros).
        ShapeError: the filter chose a layer that M does not divide, or whose shape the recipe cannot do with. The model is then as it was.

    Example:
        >>> from nmkernels.recipes import SRSTE
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
        >>> len(sparsify_(model, SRSTE("2:4")).layers)
        2
    """
    recipe = resolve(recipe)
    pattern = Pattern(recipe.pattern)
    if any(isinstance(m, NMWeight) for m in model.modules()):
        raise RecipeError(
            "sparsify_: the model has sparse layers already; handle.remove() or densify_(model) gives the dense model back first."
        )
    chosen, report = select(model, pattern, filter_fn, recipe.unwise, recipe.obstacle)
    if not chosen:
        raise RecipeError(f"sparsify_: no layer of the model can be made {pattern} sparse:\n{report}")
    layers: dict[str, NMWeight] = {c.name: make_sparse_(c.module, pattern) for c in chosen}
    switch_fast_paths(model)
    try:
        return Handle(model, recipe, layers, report)
    except Exception:
        densify_(model)
        raise
