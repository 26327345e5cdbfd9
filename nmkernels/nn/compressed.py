"""CompressedLinear: the deployed layer, which holds only the compressed weight; and compress_, which makes it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import ops
from ..autograd import linear_compressed
from ..pattern import DtypeError, Pattern, RecipeError, ShapeError
from .conv1d import SparseConv1D
from .linear import NMWeight, SparseLinear

LAYOUTS = ("linear", "conv1d")


class CompressedLinear(nn.Module):
    """y = x Wᵀ + b with W held in the compressed N:M form: N/M of the values and 2, 4 or 8 bits of index for each.

    Args:
        weight: the compressed weight of shape ``(out, in)``.
        bias: ``(out,)`` or None; a Parameter stays the same Parameter.
        layout: how the dense module stores its weight: ``"linear"`` ``(out, in)`` or ``"conv1d"`` ``(in, out)``. The product is the same.

    Differentiable in x and in the bias; the compressed weight is a constant.

    Raises:
        ShapeError: the weight is not a matrix, the bias does not fit, or the layout is unknown.

    Example:
        >>> c = ops.compress(torch.randn(4, 8), "2:4")
        >>> CompressedLinear(c)(torch.randn(3, 8)).shape
        torch.Size([3, 4])
    """

    values: Tensor
    indices: Tensor

    def __init__(self, weight: ops.Compressed, bias: Tensor | None = None, layout: str = "linear") -> None:
        super().__init__()
        if len(weight.shape) != 2:
            raise ShapeError(f"CompressedLinear: the weight must be a matrix (out, in), got shape {tuple(weight.shape)}.")
        if layout not in LAYOUTS:
            raise ShapeError(f"CompressedLinear: layout {layout!r} is unknown; choose one of {', '.join(LAYOUTS)}.")
        self.out_features, self.in_features = (int(s) for s in weight.shape)
        if bias is not None and tuple(bias.shape) != (self.out_features,):
            raise ShapeError(f"CompressedLinear: bias has shape {tuple(bias.shape)}, the weight needs ({self.out_features},).")
        self.pattern: Pattern = weight.pattern
        self.layout = layout
        self.register_buffer("values", weight.values)
        self.register_buffer("indices", weight.indices)
        if bias is None or isinstance(bias, nn.Parameter):
            self.bias = bias
        else:
            self.bias = nn.Parameter(bias)
        self._view: ops.Compressed | None = weight

    @classmethod
    def from_compressed(cls, c: ops.Compressed, bias: Tensor | None = None, layout: str = "linear") -> CompressedLinear:
        """The layer that multiplies ``c``; the same as the constructor, for symmetry with ``from_dense``."""
        return cls(c, bias, layout)

    @property
    def weight(self) -> ops.Compressed:
        """The compressed weight ``(out, in)``, over the layer's own buffers."""
        view = self._view
        # moving or casting the module replaces its buffers; the view and its cached layouts go with them
        if view is None or view.values is not self.values or view.indices is not self.indices:
            view = ops.Compressed(self.values, self.indices, self.pattern, (self.out_features, self.in_features))
            if not torch.compiler.is_compiling():
                self._view = view
        return view

    def forward(self, x: Tensor) -> Tensor:
        """y = x Wᵀ + b; x ``(..., in)`` in the weight's dtype, or any floating dtype under autocast."""
        weight = self.weight
        if torch.is_autocast_enabled(x.device.type) and weight.values.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            x = x.to(dtype)
            if weight.values.dtype != dtype:
                weight = ops.Compressed(weight.values.to(dtype), weight.indices, weight.pattern, weight.shape)
        elif x.dtype != weight.values.dtype:
            raise DtypeError(f"CompressedLinear: x is {x.dtype}, the weight {weight.values.dtype}; cast one of them, or use torch.autocast.")
        return linear_compressed(x, weight, self.bias)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_view": None}

    def extra_repr(self) -> str:
        """What ``print(model)`` shows: shapes, pattern, dtype and layout."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"pattern={self.pattern}, dtype={self.values.dtype}, layout={self.layout}"
        )


def compress_(model: nn.Module) -> nn.Module:
    """Replace every finished SparseLinear of ``model`` by a CompressedLinear, in place, and return the model.

    The products are unchanged; the dense weights are freed. Everything is checked before anything is replaced.

    Args:
        model: a model whose recipe has been finished (``handle.finish()``).

    Raises:
        RecipeError: a layer is not finished, its weight is not N:M, or the model has no sparse layer.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, NMWeight)}
    if not layers:
        raise RecipeError(
            "compress_: the model has no SparseLinear. Train it with sparsify_ and call handle.finish() first; "
            'a model pruned elsewhere is adopted by sparsify_(model, ASP(pattern, score="existing")) and handle.finish().'
        )
    for name, layer in layers.items():
        if not layer.finished:
            raise RecipeError(f"compress_: layer {name!r} is still in training; call handle.finish() first, which leaves its weight N:M.")
        if not ops.is_nm(layer.master.detach(), layer.pattern):
            raise RecipeError(f"compress_: the weight of layer {name!r} has been changed since finish() and is no longer {layer.pattern}; finish again.")
    if isinstance(model, NMWeight):
        raise RecipeError("compress_: the model itself is one sparse layer and cannot be replaced in place; use CompressedLinear(ops.compress(...)).")
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, _compressed(layer))
    return model


def _compressed(layer: NMWeight) -> CompressedLinear:
    if not isinstance(layer, (SparseLinear, SparseConv1D)):
        raise RecipeError(f"compress_: {type(layer).__name__} has no deployed form.")
    with torch.no_grad():
        packed = ops.compress(layer.master.detach(), layer.pattern)
    new = CompressedLinear(packed, layer.bias, "conv1d" if layer.transposed else "linear")
    return new.train(layer.training)
