"""The way back to the dense model."""

from __future__ import annotations

from torch import nn

from ..nn import NMWeight, make_dense_, switch_fast_paths


def densify_(model: nn.Module) -> nn.Module:
    """Turn every sparse layer of ``model`` back into the dense layer that it was, in place, and return the model.

    Module and Parameter objects, hooks and mode stay; the weights stay as they are: dense in training, N:M after ``finish``.

    Example:
        >>> from nmkernels.nn import SparseLinear
        >>> model = nn.Sequential(SparseLinear(64, 64), nn.ReLU())
        >>> type(densify_(model)[0]).__name__
        'Linear'
    """
    for module in [m for m in model.modules() if isinstance(m, NMWeight)]:
        make_dense_(module)
    switch_fast_paths(model)
    return model
