"""The way back to the dense model."""

from __future__ import annotations

from torch import nn

from ..nn import NMWeight, make_dense_, switch_fast_paths
from ..pattern import RecipeError


def densify_(model: nn.Module) -> nn.Module:
    """Turn every sparse layer of ``model`` back into the dense layer that it was, in place, and return the model.

    Module and Parameter objects, hooks and mode stay; the weights stay as they are: dense in training, N:M after ``finish``.

    Raises:
        RecipeError: an optimizer is attached; ``handle.remove()`` takes the recipe out of it and then does the same.

    Example:
        >>> from nmkernels.nn import SparseLinear
        >>> model = nn.Sequential(SparseLinear(64, 64), nn.ReLU())
        >>> type(densify_(model)[0]).__name__
        'Linear'
    """
    layers = [m for m in model.modules() if isinstance(m, NMWeight)]
    if any(layer.used.attached for layer in layers):
        raise RecipeError("densify_: an optimizer is attached to this model's recipe; call handle.remove(), which detaches it first.")
    for layer in layers:
        make_dense_(layer)
    switch_fast_paths(model)
    return model
