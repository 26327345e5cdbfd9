"""sparsify_: swap a model's linear layers for sparse ones in place, and get the handle that drives the recipe."""

from __future__ import annotations

from torch import nn

from ..nn import NMWeight, from_conv1d, from_linear
from ..pattern import Pattern, RecipeError
from .base import Recipe
from .handle import Handle
from .registry import resolve
from .select import FilterFn, select
from .swap import replace, switch_off_fast_paths


def sparsify_(model: nn.Module, recipe: Recipe | str, filter_fn: FilterFn | None = None) -> Handle:
    """Swap the linear layers of ``model`` for sparse ones, in place, and return the handle that drives the recipe.

    Parameter objects, hooks, dtype, device and mode are kept, and ``state_dict`` keys stay those of the dense model, so optimizers
    may be built before or after. Taken are ``nn.Linear`` and Hugging Face's ``Conv1D``; left dense and reported are tied weights, output
    heads, layers that M does not divide, tiny ones, and what a parent bypasses. ``print(handle.report)`` shows every layer and why.

    Args:
        model: any module; its own class is not changed.
        recipe: a recipe, or its name such as ``"srste:2:4"``.
        filter_fn: ``filter_fn(module, name) -> bool`` chooses the layers instead of the default rules.

    Raises:
        RecipeError: no layer can be made sparse, the model is sparse already, or the filter chose an impossible layer.
        ShapeError: the filter chose a layer that M does not divide.

    Example:
        >>> from nmkernels.recipes import SRSTE
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
        >>> len(sparsify_(model, SRSTE("2:4")).layers)
        2
    """
    recipe = resolve(recipe)
    pattern = Pattern(recipe.pattern)
    if any(isinstance(m, NMWeight) for m in model.modules()):
        raise RecipeError("sparsify_: the model has sparse layers already; handle.remove() or densify_(model) gives the dense model back first.")
    chosen, report = select(model, pattern, filter_fn)
    if not chosen:
        raise RecipeError(f"sparsify_: no layer of the model can be made {pattern} sparse:\n{report}")
    if chosen[0].name == "":
        raise RecipeError("sparsify_: the model itself is one linear layer and cannot be swapped in place; wrap it in a module, or use SparseLinear.")
    layers: dict[str, NMWeight] = {}
    for c in chosen:
        layer: NMWeight = from_linear(c.module, pattern) if isinstance(c.module, nn.Linear) else from_conv1d(c.module, pattern)
        replace(model, c.module, layer)
        layers[c.name] = layer
    return Handle(model, recipe, layers, report, switch_off_fast_paths(model, set(layers.values())))
