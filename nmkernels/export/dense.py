"""A sparse model as an ordinary dense file whose zeros are exact, for programs that know nothing of compressed weights."""

from __future__ import annotations

import json
import os

from torch import Tensor, nn

from .. import ops
from ..nn import NMWeight
from ..pattern import RecipeError
from ._tensors import compressed_layers, other_tensors, without_aliases, write


def save_dense(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a finished model to an ordinary safetensors file, under the dense model's names and shapes, atomically.

    Pruned weights are exact zeros; the metadata entry ``nm`` is a JSON table of the sparse layers' patterns. The file
    loads with ``safetensors.torch.load_model`` into the dense model. Tied tensors are stored once, as that function expects.

    Args:
        model: finished (``handle.finish()``), compressed (``nm.compress_``), or plain dense.
        path: file to write; its folder must exist.

    Raises:
        RecipeError: a layer is still in training, or its weight is not N:M. CheckpointError: the file cannot be written.
    """
    patterns: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, NMWeight):
            if not module.finished or not ops.is_nm(module.master.detach(), module.pattern):
                raise RecipeError(f"save_dense: the weight of layer {name!r} is not {module.pattern}; call handle.finish() first.")
            patterns[name] = str(module.pattern)
    layers = compressed_layers(model)
    tensors = other_tensors(model, layers)
    weights: dict[int, Tensor] = {}
    for name, layer in layers.items():
        if id(layer) not in weights:
            dense = layer.weight.dense()
            weights[id(layer)] = dense.t() if layer.layout == "conv1d" else dense
        tensors[f"{name}.weight" if name else "weight"] = weights[id(layer)]
        patterns[name] = str(layer.pattern)
    tensors, aliases = without_aliases(tensors)
    # the library's own convention for tied weights: dropped name -> kept name, as metadata entries
    write(path, tensors, {"format": "pt", "nm": json.dumps(patterns), **aliases})
