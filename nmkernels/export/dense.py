"""A sparse model as an ordinary dense file whose zeros are exact, for programs that know nothing of compressed weights."""

from __future__ import annotations

import json
import os

from torch import Tensor, nn

from .. import ops
from ..nn import ADAPTER, CompressedLinear, NMWeight, adapter_of, folded
from ..pattern import RecipeError
from .tensors import compressed_layers, other_tensors, plain_modules, without_aliases, write


def save_dense(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a finished model to an ordinary safetensors file, under the dense model's names and shapes, atomically.

    Pruned weights are exact zeros; the metadata entry ``nm`` is a JSON table of the sparse layers' patterns. A layer with a low-rank
    adapter is written as the one dense weight W + (L R)ᵀ / r, which computes the same but has no zeros, and is not in that table. The
    file loads with ``safetensors.torch.load_model`` into the dense model. Tied tensors are stored once, as that function expects.

    Args:
        model: finished (``handle.finish()``), compressed (``nm.compress_``), or plain dense.
        path: file to write; its folder must exist.

    Raises:
        RecipeError: a layer is still in training, or its weight is not N:M. CheckpointError: the file cannot be written.
    """
    weights: dict[int, Tensor] = {}
    sparse = {name: layer for name, (_, layer) in plain_modules(model).items() if isinstance(layer, (NMWeight, CompressedLinear))}
    for name, layer in sparse.items():
        if id(layer) not in weights:
            weights[id(layer)] = _dense_weight(name, layer)
    tensors = other_tensors(model, compressed_layers(model))
    patterns: dict[str, str] = {}
    for name, layer in sparse.items():
        prefix = f"{name}." if name else ""
        tensors[f"{prefix}weight"] = weights[id(layer)]
        if adapter_of(layer) is None:
            patterns[name] = str(layer.pattern)
        else:
            for part in ADAPTER:
                del tensors[prefix + part]
    tensors, aliases = without_aliases(tensors)
    # the library's own convention for tied weights: dropped name -> kept name, as metadata entries
    write(path, tensors, {"format": "pt", "nm": json.dumps(patterns), **aliases})


def _dense_weight(name: str, layer: NMWeight | CompressedLinear) -> Tensor:
    """The weight as the dense model stores it, a finished layer's own tensor where that is enough."""
    adapter = adapter_of(layer)
    if isinstance(layer, NMWeight):
        if not layer.finished or not ops.is_nm(layer.grouped.detach(), layer.pattern):
            raise RecipeError(f"save_dense: the weight of layer {name!r} is not {layer.pattern}; call handle.finish() first.")
        if adapter is None:
            return layer.weight.detach()
        weight, transposed = layer.master.detach(), layer.transposed
    else:
        weight, transposed = layer.dense(), layer.layout == "conv1d"
    weight = weight if adapter is None else folded(weight, *adapter)
    return weight.t() if transposed else weight
