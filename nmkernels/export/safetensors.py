"""The file format of compressed models, plain safetensors that are the same for every device; and ordinary dense files.

A compressed layer ``fqn`` is stored as ``fqn.weight.values`` and ``fqn.weight.indices``; a low-rank adapter as ``fqn.nm_left`` and
``fqn.nm_right``; reordered inputs as ``fqn.weight.columns``. Every other tensor has its name in the dense model. Names are those of the
model without wrappers (``torch.compile``, DDP). A stack of experts is stored under the name of its Parameter, as ``name.values``
``(E, out, kept)`` and ``name.indices``.

Values that are integers have steps in ``fqn.weight.step``, bfloat16 ``(out, in / group)``, or ``(out, 1)`` for one per row; a weight is
integer · step. Values are then int8 ``(out, kept)``, from -127 to 127, or for 4 bits uint8 ``(out, ⌈kept / 2⌉)``, two's complement, the
earlier integer in the low half of a byte, each row starting on a byte, a spare half 0.

The metadata has ``format`` "nmkernels", ``version``, ``layers`` (per layer: pattern, shape ``(out, in)`` or ``(E, out, in)``, dtype,
layout, the ``rank`` of an adapter, ``columns`` true if inputs are reordered, the ``kernel`` ``[kh, kw]`` of a convolution, whose ``in``
is ``kh · kw · in`` with channels innermost, and for integers ``values`` "int8" or "int4", and ``group``, the columns that share a step, 0
for a row; ``dtype`` is then that of the dense layer) and, if weights are tied, ``aliases`` (name -> name of the stored tensor).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..layouts import CONV2D, MATRICES, as_matrix, as_stored
from ..nn.adapter import ADAPTER, adapter_of, folded
from ..nn.compressed import CompressedLinear
from ..nn.experts import CompressedStack, child_name
from ..nn.sharding import fsdp_modules, reshard
from ..nn.weight import NMWeight
from ..pattern import CheckpointError, RecipeError
from ..shards import is_sharded, whole
from .gather import Gatherer
from .plan import home_of, load
from .tensors import Contents, Layer, other_tensors, plain_names, quote, read, read_folder, sparse_layers, weight_name

FORMAT = "nmkernels"
HUGGING_FACE = "pt"
"""The ``format`` in files of ``save_pretrained``, which transformers sets; the other entries are the same."""
VERSION = 5
"""The newest version that can be read. A file is written in the oldest sufficient version: 5 if values are integers, 4 if a weight is not a
matrix, 3 if inputs are reordered, 2 if a layer has an adapter, else 1."""


def save_compressed(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model that ``compress_`` has compressed to one safetensors file, atomically.

    A model with sharded weights (FSDP2) only has to be finished. All ranks then call this: each compresses its shards, the layers are
    gathered one by one in packed form, and the first rank writes; no rank ever holds the whole dense model.

    Args:
        model: a model with compressed layers, or sharded finished ones, and no layer still in training.
        path: file to write; its folder must exist.

    Raises:
        RecipeError: the model is not compressed yet.
        CheckpointError: the file cannot be written; raised on every rank.

    Example:
        >>> import tempfile, os, torch, nmkernels as nm
        >>> from torch import nn
        >>> model = nn.Sequential(nm.nn.CompressedLinear(nm.ops.compress(torch.randn(4, 8), "2:4")))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     nm.save_compressed(model, os.path.join(folder, "m.safetensors"))
        ...     same = nm.load_compressed(nn.Sequential(nn.Linear(8, 4, bias=False)), os.path.join(folder, "m.safetensors"))
        >>> torch.equal(model[0].values, same[0].values)
        True
    """
    reshard(model)
    layers = sparse_layers(model)
    for name, layer in layers.items():
        if isinstance(layer, NMWeight) and not (layer.finished and is_sharded(layer.parameter)):
            raise RecipeError(f"save_compressed: layer {name!r} is not compressed; call handle.finish() and nm.compress_(model) first.")
    if not layers:
        raise RecipeError("save_compressed: the model has no compressed layer; call nm.compress_(model) first, or use nm.save_dense.")
    if "" in layers:
        raise RecipeError(
            "save_compressed: the model itself is one CompressedLinear, which loading could not swap in; put it in an nn.Sequential."
        )
    gatherer = Gatherer(model)
    gatherer.raise_together(_not_nm("save_compressed", layers))
    tensors = other_tensors(model, layers)
    about: dict[str, dict[str, Any]] = {}
    packed: dict[int, ops.Compressed] = {}  # a layer may have several names
    for name, layer in layers.items():
        if isinstance(layer, CompressedStack):
            about[name] = _about(layer, layer.shape, layer.values.dtype)
            tensors |= {f"{name}.values": layer.values, f"{name}.indices": layer.indices}
            continue
        if id(layer) not in packed:
            packed[id(layer)] = gatherer.packed(layer)
        weight, order = packed[id(layer)], layer.order if isinstance(layer, CompressedLinear) else layer.columns
        about[name] = _about(layer, weight.shape, layer.dtype if isinstance(layer, CompressedLinear) else weight.dtype) | _rounded(weight)
        tensors[f"{name}.weight.values"] = weight.values
        tensors[f"{name}.weight.indices"] = weight.indices
        if weight.step is not None:
            tensors[f"{name}.weight.step"] = weight.step
        if order is not None:
            about[name]["columns"] = True
            tensors[f"{name}.weight.columns"] = order.to(torch.int32)
    gatherer.write(path, tensors, {"format": FORMAT, **described(about)}, lambda aliases: {"aliases": json.dumps(aliases)})


def table(layers: Mapping[str, Layer]) -> dict[str, dict[str, Any]]:
    """The ``layers`` entry of the metadata for compressed ``layers``, by name."""
    about = {}
    for name, layer in layers.items():
        if isinstance(layer, CompressedStack):
            about[name] = _about(layer, layer.shape, layer.values.dtype)
        elif isinstance(layer, CompressedLinear):
            about[name] = _about(layer, (layer.out_features, layer.in_features), layer.dtype) | _rounded(layer.weight)
            if layer.order is not None:
                about[name]["columns"] = True
    return about


def described(about: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The metadata of a file with the table ``about``, in the oldest sufficient version."""
    version = max(map(_version, about.values()))
    return {"version": str(version), "layers": json.dumps(about)}


def _about(layer: Layer, shape: Sequence[int], dtype: torch.dtype) -> dict[str, Any]:
    about = {
        "pattern": str(layer.pattern),
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "layout": layer.layout,
    }
    if layer.layout == CONV2D:
        about["kernel"] = list(layer.parameter.shape[2:] if isinstance(layer, NMWeight) else layer.stored_shape[2:])
    adapter = adapter_of(layer)
    return about if adapter is None else {**about, "rank": int(adapter[0].shape[1])}


def _rounded(weight: ops.Compressed) -> dict[str, Any]:
    """The part of a layer's entry on integers."""
    return {} if weight.step is None else {"values": weight.kind, "group": weight.group}


def _version(about: dict[str, Any]) -> int:
    """The oldest format version with such layers."""
    return 5 if "values" in about else 4 if about["layout"] not in MATRICES else 3 if "columns" in about else 2 if "rank" in about else 1


def _not_nm(verb: str, layers: Mapping[str, Layer]) -> str:
    """The error message for the first layer whose weight, or this rank's part of it, is not N:M; empty if all are."""
    for name, layer in layers.items():
        reason = layer.computed("weight", "bias") if isinstance(layer, NMWeight) else ""
        if reason:
            return f"{verb}: layer {name!r} cannot be saved: {reason}."
        if isinstance(layer, NMWeight) and not (layer.finished and ops.is_nm(layer.grouped.detach(), layer.pattern)):
            return f"{verb}: the weight of layer {name!r} is not {layer.pattern}; call handle.finish() first."
    return ""


def save_dense(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a finished model to an ordinary safetensors file, with the dense model's names and shapes, atomically.

    ``safetensors.torch.load_model`` loads it into the dense model. Pruned weights are exact zeros; the metadata entry ``nm`` is a JSON
    table of the sparse layers' patterns. A layer with a low-rank adapter is written as one dense weight W + (L R)ᵀ / r, which is
    equivalent but has no zeros, and is not in that table.

    Args:
        model: finished (``handle.finish()``), compressed (``nm.compress_``), or plain dense; if it is sharded, all ranks call this and
            the first writes.
        path: file to write; its folder must exist.

    Raises:
        RecipeError: a layer is still in training, or its weight is not N:M.
        CheckpointError: the file cannot be written.
    """
    reshard(model)
    sparse, gatherer = sparse_layers(model), Gatherer(model)
    gatherer.raise_together(_not_nm("save_dense", sparse))
    # one tensor for a layer with two names
    weights = {id(layer): _dense_weight(layer, gatherer) for layer in {id(layer): layer for layer in sparse.values()}.values()}
    tensors = other_tensors(model, {name: layer for name, layer in sparse.items() if not isinstance(layer, NMWeight)})
    patterns: dict[str, str] = {}
    for name, layer in sparse.items():
        tensors[weight_name(name, layer)] = weights[id(layer)]
        if adapter_of(layer) is None:
            patterns[name] = str(layer.pattern)
        else:
            for part in ADAPTER:
                del tensors[f"{name}.{part}" if name else part]
    # safetensors' convention for tied weights: metadata entries, dropped name -> stored name
    gatherer.write(path, tensors, {"format": "pt", "nm": json.dumps(patterns)}, lambda aliases: aliases)


def _dense_weight(layer: Layer, gatherer: Gatherer) -> Tensor:
    """The weight as the dense model stores it; a finished layer's own tensor if possible."""
    if isinstance(layer, CompressedStack):
        return layer.dense()
    adapter = adapter_of(layer)
    if isinstance(layer, NMWeight):
        if adapter is None:
            return layer.parameter.detach()
        weight = as_matrix(whole(layer.parameter.detach()), layer.layout)
    else:
        weight = gatherer.dense(layer)
    if adapter is not None:
        left, right = (whole(part.detach()) for part in adapter)
        weight = folded(weight, left, right)
    return as_stored(weight, layer.layout, layer.parameter.shape if isinstance(layer, NMWeight) else layer.stored_shape)


def load_compressed(model: nn.Module, path: str | os.PathLike[str], keep_dense: bool = False) -> nn.Module:
    """Load a compressed file into a freshly built dense model, in place, and return the model.

    The layers named in the file become CompressedLinear and CompressedConv2d, with the file's adapters; every other tensor is copied.
    Names, shapes, dtypes and indices are checked before the model is changed, so loading an untrusted file is safe. If tensor parallelism
    (``parallelize_module``) has split the model, every rank reads the file and keeps its part.

    Args:
        model: the dense architecture that was trained, on any device, the meta device included. Both this model and the saved one may
            be wrapped by ``torch.compile``, ``DistributedDataParallel`` or activation checkpointing.
        path: a file of ``save_compressed``, or a folder of ``save_pretrained`` with one file or several.
        keep_dense: see ``CompressedLinear``.

    Raises:
        CheckpointError: the file is missing, not a regular file, truncated, damaged, of another format or a newer version, or does not fit
            the model; or the model is sharded by ``fully_shard``. The model is then unchanged.
    """
    if fsdp_modules(model):
        raise CheckpointError(
            "load_compressed: fully_shard has sharded the model, and it cannot shard compressed weights, which are not Parameters. Load "
            "into a plain model on each rank; its dense layers can be sharded afterwards."
        )
    contents = read_folder(path) if os.path.isdir(path) else read(path)
    _check_ours(contents)
    table = contents.json("layers")
    if contents.metadata["format"] == HUGGING_FACE:
        _rename(contents, table)
        _add_tied(contents, model)
    _add_aliases(contents)
    load(model, contents, table, keep_dense)
    return model


def _rename(contents: Contents, table: dict[str, Any]) -> None:
    """Rename compressed weights of ``save_pretrained``, which have the names of the layer's buffers, to the names of this format."""
    tensors = contents.tensors
    for name, about in table.items():
        dense, buffers = (f"{name}.weight", name) if home_of(name, about)[0] == name else (name, child_name(name))
        for part in ("values", "indices", "step", "columns"):
            if f"{buffers}.{part}" in tensors and f"{dense}.{part}" not in tensors:
                tensors[f"{dense}.{part}"] = tensors.pop(f"{buffers}.{part}")
        empty = tensors.get(dense)
        if empty is not None and not empty.numel():
            del tensors[dense]  # it makes loading without nmkernels fail


def _add_tied(contents: Contents, model: nn.Module) -> None:
    """Add tensors that ``save_pretrained`` leaves out because the model's class ties them to others."""
    plain = plain_names(model)
    names: dict[int, list[str]] = {}
    for given, value in model.state_dict(keep_vars=True).items():
        names.setdefault(id(value), []).append(plain(given))
    for tied in names.values():
        first = next((name for name in tied if name in contents.tensors), None)
        if first is not None:
            for name in tied:
                contents.tensors.setdefault(name, contents.tensors[first])


def _add_aliases(contents: Contents) -> None:
    stored = dict(contents.tensors)
    for alias, name in contents.json("aliases").items():
        lacks = not isinstance(name, str) or name not in stored
        if lacks or alias in stored:
            but = "which the file does not hold" if lacks else "but the file holds it itself"
            raise CheckpointError(f"{contents.path}: tensor {quote(alias)} is stored as an alias of {quote(name)}, {but}.")
        contents.tensors[alias] = stored[name]


def _check_ours(contents: Contents) -> None:
    about = contents.metadata
    if about.get("format") != FORMAT and not (about.get("format") == HUGGING_FACE and "layers" in about):
        what = "; its zeros are N:M but its weights are dense: load it with safetensors.torch.load_model" if "nm" in about else ""
        raise CheckpointError(
            f"{contents.path} is a safetensors file, but not one that nm.save_compressed wrote, or save_pretrained of a compressed "
            f"model{what}."
        )
    version = about.get("version", "")
    if not (version.isdecimal() and len(version) < 10) or int(version) < 1:
        raise CheckpointError(f"{contents.path}: the format version {quote(version)} is not a number; the metadata is damaged.")
    if int(version) > VERSION:
        raise CheckpointError(
            f"{contents.path} was written in format version {version}; this one reads up to {VERSION}: upgrade nmkernels."
        )
