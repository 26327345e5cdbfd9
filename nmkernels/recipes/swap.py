"""Putting one module in another's place, the way back to the dense model, and the fused paths that would bypass a layer."""

from __future__ import annotations

from torch import nn

from ..nn import NMWeight, SparseConv1D, SparseLinear, to_conv1d, to_linear
from ..pattern import RecipeError


def densify_(model: nn.Module) -> nn.Module:
    """Give every sparse layer of ``model`` back as the dense layer it was made from, in place, its weight as it is.

    Example:
        >>> model = nn.Sequential(SparseLinear(64, 64), nn.ReLU())
        >>> type(densify_(model)[0]).__name__
        'Linear'
    """
    for module in [m for m in model.modules() if isinstance(m, NMWeight)]:
        if module is model:
            raise RecipeError("densify_: the model itself is one sparse layer and cannot be swapped in place; wrap it in a module.")
        dense = to_linear(module) if isinstance(module, SparseLinear) else to_conv1d(module) if isinstance(module, SparseConv1D) else None
        if dense is not None:
            replace(model, module, dense)
    return model


def replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put ``new`` in every place where ``old`` stands: a module may be registered under several names."""
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is old:
                parent._modules[key] = new


def switch_off_fast_paths(model: nn.Module, layers: set[NMWeight]) -> list[tuple[nn.Module, str, object]]:
    """Make ``nn.TransformerEncoderLayer`` call its layers in eval; its fused path reads their dense weights and never calls them.

    Returns what was changed, as (module, attribute, old value), so that ``remove`` can put it back.
    """
    changed: list[tuple[nn.Module, str, object]] = []
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(m in layers for m in module.modules()):
            changed.append((module, "activation_relu_or_gelu", module.activation_relu_or_gelu))
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder) and any(m in layers for m in module.modules()):
            # nested tensors are only understood by the fused path
            changed.append((module, "use_nested_tensor", module.use_nested_tensor))
            module.use_nested_tensor = False
    return changed
