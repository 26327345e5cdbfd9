"""The canonical file of a compressed model: plain safetensors, the same on every device; and an ordinary dense file of it.

A compressed layer ``fqn`` is stored as ``fqn.weight.values`` and ``fqn.weight.indices``, its low-rank adapter, where it has one,
as ``fqn.nm_left`` and ``fqn.nm_right``, and the order in which it takes its inputs, where that is not their own, as
``fqn.weight.columns``; every other tensor has the dense model's name. Names are those of the model without wrappers (``torch.compile``,
DDP). A stack of experts is stored under the name of its Parameter, as ``name.values`` ``(E, out, kept)`` and ``name.indices``.

The metadata says ``format`` "nmkernels", ``version``, ``layers`` (per layer: pattern, shape ``(out, in)`` or ``(E, out, in)``, dtype,
layout, the ``rank`` of an adapter, ``columns`` true where there is an order, and the ``kernel`` ``[kh, kw]`` of a convolution, whose ``in``
is ``kh · kw · in``, the channels innermost) and, where weights are tied, ``aliases`` (name -> name of the stored tensor).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..layouts import CONV2D, MATRICES, as_stored
from ..nn import ADAPTER, CompressedLinear, CompressedStack, NMWeight, adapter_of, folded
from ..nn.experts import child_name
from ..nn.gather import fsdp_modules, reshard
from ..pattern import CheckpointError, RecipeError
from ..shards import is_sharded, whole
from .plan import home_of, load
from .ranks import Ranks
from .tensors import Contents, Layer, other_tensors, plain_names, quote, read, read_folder, sparse_layers, weight_name

FORMAT = "nmkernels"
HUGGING_FACE = "pt"
"""The format of a file that ``save_pretrained`` wrote: transformers puts it into the metadata, with ours beside it."""
VERSION = 4
"""The newest version that is read. A file is written as the oldest version that can hold it: 4 where a weight is no matrix, 3 where a layer
has an order of its inputs, 2 where one has an adapter, else 1."""


def save_compressed(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model that ``compress_`` has compressed to one safetensors file, atomically.

    A model whose weights are sharded (FSDP2) need only be finished. Then all ranks call this: each compresses its shards, one layer after
    the other is gathered packed, and the first rank writes; no rank ever has a dense model, nor any but the first a packed one.

    Args:
        model: holds at least one CompressedLinear, or sharded finished layers, and no layer still in training.
        path: file to write; its folder must exist.

    Raises:
        RecipeError: the model is not compressed yet.
        CheckpointError: the file cannot be written. Of a sharded model on every rank.

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
            "save_compressed: the model itself is one CompressedLinear, which loading cannot swap in; put it in an nn.Sequential."
        )
    ranks = Ranks(model)
    ranks.agree(_not_nm("save_compressed", layers))
    tensors = other_tensors(model, layers)
    about: dict[str, dict[str, Any]] = {}
    packed: dict[int, ops.Compressed] = {}  # a layer may have several names
    for name, layer in layers.items():
        if isinstance(layer, CompressedStack):
            about[name] = _about(layer, layer.shape, layer.values.dtype)
            tensors |= {f"{name}.values": layer.values, f"{name}.indices": layer.indices}
            continue
        if id(layer) not in packed:
            packed[id(layer)] = ranks.packed(layer)
        weight, order = packed[id(layer)], layer.order if isinstance(layer, CompressedLinear) else layer.columns
        about[name] = _about(layer, weight.shape, weight.dtype)
        tensors[f"{name}.weight.values"] = weight.values
        tensors[f"{name}.weight.indices"] = weight.indices
        if order is not None:
            about[name]["columns"] = True
            tensors[f"{name}.weight.columns"] = order.to(torch.int32)
    ranks.write(path, tensors, {"format": FORMAT, **described(about)}, lambda aliases: {"aliases": json.dumps(aliases)})


def table(layers: Mapping[str, Layer]) -> dict[str, dict[str, Any]]:
    """What a file says of compressed ``layers``, by their names."""
    about = {}
    for name, layer in layers.items():
        if isinstance(layer, CompressedStack):
            about[name] = _about(layer, layer.shape, layer.values.dtype)
        elif isinstance(layer, CompressedLinear):
            about[name] = _about(layer, (layer.out_features, layer.in_features), layer.values.dtype)
            if layer.order is not None:
                about[name]["columns"] = True
    return about


def described(about: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The metadata of a file with the table ``about``, in the oldest version that can hold it."""
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


def _version(about: dict[str, Any]) -> int:
    """The oldest version that knows such a layer."""
    return 4 if about["layout"] not in MATRICES else 3 if "columns" in about else 2 if "rank" in about else 1


def _not_nm(verb: str, layers: Mapping[str, Layer]) -> str:
    """What to say of the first layer whose weight, or this rank's part of it, is not N:M; empty where all are."""
    for name, layer in layers.items():
        said = layer.computed("weight", "bias") if isinstance(layer, NMWeight) else ""
        if said:
            return f"{verb}: layer {name!r} cannot be saved: {said}."
        if isinstance(layer, NMWeight) and not (layer.finished and ops.is_nm(layer.grouped.detach(), layer.pattern)):
            return f"{verb}: the weight of layer {name!r} is not {layer.pattern}; call handle.finish() first."
    return ""


def save_dense(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a finished model to an ordinary safetensors file, under the dense model's names and shapes, atomically.

    It loads with ``safetensors.torch.load_model`` into the dense model. Pruned weights are exact zeros; the metadata entry ``nm`` is a
    JSON table of the sparse layers' patterns. A layer with a low-rank adapter is written as the one dense weight W + (L R)ᵀ / r, which
    computes the same but has no zeros, and is not in that table.

    Args:
        model: finished (``handle.finish()``), compressed (``nm.compress_``), or plain dense; of a sharded one all ranks call this, and
            the first gathers and writes it.
        path: file to write; its folder must exist.

    Raises:
        RecipeError: a layer is still in training, or its weight is not N:M.
        CheckpointError: the file cannot be written.
    """
    reshard(model)
    sparse, ranks = sparse_layers(model), Ranks(model)
    ranks.agree(_not_nm("save_dense", sparse))
    # one tensor of a layer under two names
    weights = {id(layer): _dense_weight(layer, ranks) for layer in {id(layer): layer for layer in sparse.values()}.values()}
    tensors = other_tensors(model, {name: layer for name, layer in sparse.items() if not isinstance(layer, NMWeight)})
    patterns: dict[str, str] = {}
    for name, layer in sparse.items():
        tensors[weight_name(name, layer)] = weights[id(layer)]
        if adapter_of(layer) is None:
            patterns[name] = str(layer.pattern)
        else:
            for part in ADAPTER:
                del tensors[f"{name}.{part}" if name else part]
    # the library's own convention for tied weights: dropped name -> kept name, as metadata entries
    ranks.write(path, tensors, {"format": "pt", "nm": json.dumps(patterns)}, lambda aliases: aliases)


def _dense_weight(layer: Layer, ranks: Ranks) -> Tensor:
    """The weight as the dense model stores it, a finished layer's own tensor where that is enough."""
    if isinstance(layer, CompressedStack):
        return layer.dense()
    adapter = adapter_of(layer)
    if isinstance(layer, NMWeight):
        if adapter is None:
            return layer.parameter.detach()
        weight = layer.matrix(whole(layer.parameter.detach()))
    else:
        weight = ranks.dense(layer)
    if adapter is not None:
        left, right = (whole(part.detach()) for part in adapter)
        weight = folded(weight, left, right)
    return as_stored(weight, layer.layout, layer.parameter.shape if isinstance(layer, NMWeight) else layer.stored_shape)


def load_compressed(model: nn.Module, path: str | os.PathLike[str], keep_dense: bool = False) -> nn.Module:
    """Load a compressed file into a freshly built dense model, in place, and return the model.

    The layers named in the file become CompressedLinear and CompressedConv2d, with the file's adapters; every other tensor is copied.
    Names, shapes, dtypes and indices are all checked before the model is touched, and a file from a stranger can do no more than be
    refused. Where tensor parallelism (``parallelize_module``) has split the model, every rank reads the file and keeps its part.

    Args:
        model: the dense architecture that was trained, on any device, also the meta device. It and the model that was saved may each be
            inside ``torch.compile``, ``DistributedDataParallel`` or an activation checkpoint.
        path: a file that ``save_compressed`` wrote, or a folder that ``save_pretrained`` did, of one file or several.
        keep_dense: see ``CompressedLinear``.

    Raises:
        CheckpointError: the file is missing, no regular file, truncated, damaged, foreign, newer than this version, or does not fit the
            model, or that is sharded by ``fully_shard``; it is then as it was.
    """
    if fsdp_modules(model):
        raise CheckpointError(
            "load_compressed: fully_shard has sharded the model, and it shards Parameters only, which packed weights are not. Load into a "
            "plain model on each rank; what stays dense can be sharded afterwards."
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
    """Give compressed weights the names of this format: of ``save_pretrained`` they are those of the layer's buffers."""
    tensors = contents.tensors
    for name, about in table.items():
        dense, given = (f"{name}.weight", name) if home_of(name, about)[0] == name else (name, child_name(name))
        for part in ("values", "indices", "columns"):
            if f"{given}.{part}" in tensors and f"{dense}.{part}" not in tensors:
                tensors[f"{dense}.{part}"] = tensors.pop(f"{given}.{part}")
        empty = tensors.get(dense)
        if empty is not None and not empty.numel():
            del tensors[dense]  # which keeps those from loading it who do not know compressed weights


def _add_tied(contents: Contents, model: nn.Module) -> None:
    """``save_pretrained`` leaves out what the model's class ties: take it from what it is tied to in ``model``."""
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
            raise CheckpointError(f"{contents.path}: tensor {quote(alias)} is said to be the same as {quote(name)}, {but}.")
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
