"""The file format of compressed models, plain safetensors that are the same for every device; and ordinary dense files.

Tensors have their names in the state dict of the compressed model, without wrappers (``torch.compile``, DDP): ``fqn.values`` and
``fqn.indices`` of a layer ``fqn``, ``fqn.nm_left`` and ``fqn.nm_right`` of a low-rank adapter, ``fqn.columns`` of reordered inputs; the
stack of experts that was the Parameter ``fqn.name`` has ``fqn.nm_name.values`` ``(E, out, kept)`` and ``fqn.nm_name.indices``, and for
integers ``fqn.nm_name.step`` ``(E, out, steps)``. Up to
version 5, ``save_compressed`` wrote ``fqn.weight.values`` and ``fqn.name.values``, which are read for ever; ``save_pretrained`` did not.

Values that are integers have steps in ``fqn.step``, bfloat16 ``(out, in / group)``, or ``(out, 1)`` for one per row; a weight is
integer · step. Values are then int8 ``(out, kept)``, or for 4 bits uint8 ``(out, ⌈kept / 2⌉)``, two's complement, the earlier integer in
the low half of a byte, each row starting on a byte, a spare half 0. ``compress_`` never makes -128, which converted files may have. Dense
integers, whose pattern is 1:1, have no ``fqn.indices``; an embedding has the layout "embedding" and the shape ``(ids, features)``.

The metadata has ``format`` "nmkernels", ``version``, ``layers`` (per layer: pattern, shape ``(out, in)`` or ``(E, out, in)``, dtype,
layout, the ``rank`` of an adapter, ``columns`` true if inputs are reordered, the ``kernel`` ``[kh, kw]`` of a convolution, whose ``in``
is ``kh · kw · in`` with channels innermost, and for integers ``values`` "int8" or "int4", and ``group``, the columns that share a step, 0
for a row; ``dtype`` is then that of the dense layer) and, if weights are tied, ``aliases`` (name -> name of the stored tensor).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..layouts import CONV1D, CONV2D, MATRICES, REDUCED, as_matrix, as_stored
from ..nn.adapter import ADAPTER, adapter_of, folded
from ..nn.compressed import CompressedLinear
from ..nn.dense import has_dense_integers, weight_key
from ..nn.experts import CompressedStack, child_name
from ..nn.sharding import fsdp_modules, reshard
from ..nn.weight import NMWeight
from ..ops.integers import kind_of
from ..pattern import CheckpointError, NMError, RecipeError
from ..reference.compress import pack_indices, unpack_indices
from ..shards import is_sharded, local, place, whole
from .card import is_dense, rounds_experts
from .plan import BUFFERS, home_of, load
from .tensors import Contents, Layer, plain_state, quote, read, read_folder, sparse_layers, weight_name, write

FORMAT = "nmkernels"
HUGGING_FACE = "pt"
"""The ``format`` in files of ``save_pretrained``, which transformers sets; the other entries are the same."""
VERSION = 8
"""The newest version that can be read. ``save_compressed`` writes 8 if values of experts are integers, 7 if dense weights are, else 6.
Files of ``save_pretrained``, whose names never changed, have the oldest that suffices: 8 and 7 as above, 5 if values are integers, 4 if a
weight is not a matrix, 3 if inputs are reordered, 2 if a layer has an adapter, else 1."""


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
    finished = {name: layer for name, layer in layers.items() if isinstance(layer, NMWeight)}
    tensors = plain_state(model)
    packed = {layer: gatherer.packed(layer) for layer in dict.fromkeys(finished.values())}  # a layer may have several names
    for name, layer in finished.items():
        tensors.pop(weight_name(name, layer), None)
        tensors |= {f"{name}.values": packed[layer].values, f"{name}.indices": packed[layer].indices}
        if layer.columns is not None:
            tensors[f"{name}.columns"] = layer.columns.to(torch.int32)
    entries = table(layers)
    version = 8 if any(map(rounds_experts, entries.values())) else 7 if any(map(is_dense, entries.values())) else 6
    about = {"format": FORMAT, "version": str(version), "layers": json.dumps(entries)}
    gatherer.write(path, tensors, about, lambda aliases: {"aliases": json.dumps(aliases)})


class Gatherer:
    """Gathers the sharded tensors of ``model`` on one rank and writes them; for a model without sharded tensors, in this process.

    Attributes:
        first: whether this is the rank that keeps the gathered tensors and writes.
    """

    def __init__(self, model: nn.Module) -> None:
        meshes = [value.device_mesh for value in model.state_dict().values() if isinstance(value, Tensor) and is_sharded(value)]  # type: ignore[attr-defined]
        # with FSDP2 and tensor parallelism some tensors are on a submesh
        self.mesh: Any = max(meshes, key=lambda mesh: mesh.size(), default=None)
        self.first = self.mesh is None or not any(self.mesh.get_coordinate())

    def raise_together(self, problem: str, kind: type[NMError] = RecipeError) -> None:
        """Raise ``kind`` on every rank if any rank has a ``problem``; the other ranks would wait for that one forever."""
        problems = [problem]
        for group in () if self.mesh is None else self.mesh.get_all_groups():
            rows: list[Any] = [None] * group.size()
            torch.distributed.all_gather_object(rows, problems, group=group)
            problems = [text for row in rows for text in row]
        for text in problems:
            if text:
                raise kind(text)

    def packed(self, layer: NMWeight) -> ops.Compressed:
        """The whole compressed weight ``(out, in)`` of a finished layer on the first rank; on the meta device on the others.

        Each rank compresses its part of a sharded one.
        """
        with torch.no_grad():
            part = layer.as_pruned() or ops.compress(layer.grouped.detach(), layer.pattern)
        weight: Any = layer.parameter
        if is_sharded(weight):
            from torch.distributed.tensor import DTensor

            (rows, cols), p = layer.shape, layer.pattern
            # if shards split the columns, their index bytes may not fit together
            splits = any(placement.is_shard(REDUCED[layer.layout]) for placement in weight.placements)
            tensors = [part.values, unpack_indices(part.indices, p.index_bits, part.values.shape[1]) if splits else part.indices]
            gathered = []
            for tensor, width in zip(tensors, (p.kept(cols), p.kept(cols) if splits else p.index_bytes(cols)), strict=True):
                stored, shape = (tensor.t(), (width, rows)) if layer.layout == CONV1D else (tensor, (rows, width))
                shard = DTensor.from_local(
                    stored.contiguous(),
                    weight.device_mesh,
                    weight.placements,
                    run_check=False,
                    shape=torch.Size(shape),
                    stride=(shape[1], 1),
                )
                full = local(shard.full_tensor())
                gathered.append((full.t() if layer.layout == CONV1D else full).contiguous())
            values, indices = gathered
            part = ops.Compressed(values, pack_indices(indices, p.index_bits) if splits else indices, p, (rows, cols))
        return part.to("cpu" if self.first else "meta")

    def dense(self, layer: CompressedLinear) -> Tensor:
        """The whole weight ``(out, in)`` in dense layout on the first rank; on the meta device on the others."""
        if self.mesh is None:
            return layer.dense()
        # in the state dict, parts of a weight are DTensors
        state = {name: whole(part) for name, part in layer.state_dict().items() if name in ("values", "indices", "step")}
        if not self.first:
            return torch.empty(layer.whole_shape, dtype=layer.dtype, device="meta")
        indices = state.get("indices", state["values"].new_empty(layer.whole_shape[0], 0, dtype=torch.uint8))  # dense integers have none
        weight = ops.Compressed(state["values"], indices, layer.pattern, layer.whole_shape, state.get("step"))
        dense, order = weight.to("cpu").dense(layer.dtype), layer.order
        return dense if order is None else dense.index_select(1, order.cpu().long().argsort())

    def write(
        self,
        path: str | os.PathLike[str],
        tensors: dict[str, Tensor],
        metadata: dict[str, str],
        describe_aliases: Callable[[dict[str, str]], dict[str, str]],
    ) -> None:
        """Gather ``tensors`` and write them. Aliases are not gathered; ``describe_aliases`` turns them into metadata.

        Raises:
            CheckpointError: on every rank, if the first could not write.
        """
        # the first rank decides which tensors are tied: that is found by memory, which an empty shard has none of
        first: dict[tuple[object, ...], str] = {}
        names = [(name, first.setdefault(place(t), name)) for name, t in tensors.items() if t.numel() and not t.is_meta]
        aliases = {name: stored for name, stored in names if stored != name}
        ready: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            gathered = whole(tensor)
            if name not in aliases and self.first:
                ready[name] = gathered.cpu() if is_sharded(tensor) else tensor
        problem = ""
        if self.first:
            try:
                write(path, ready, {**metadata, **(describe_aliases(aliases) if aliases else {})})
            except CheckpointError as error:
                if self.mesh is None:
                    raise
                problem = str(error)
        self.raise_together(problem, CheckpointError)


def table(layers: Mapping[str, Layer]) -> dict[str, dict[str, Any]]:
    """The ``layers`` entry of the metadata for ``layers``, by name."""
    about: dict[str, dict[str, Any]] = {}
    for name, layer in layers.items():
        shape = layer.whole_shape if isinstance(layer, CompressedLinear) else layer.shape
        weight = layer.parameter if isinstance(layer, NMWeight) else layer
        dtype = str(weight.dtype).removeprefix("torch.")
        entry: dict[str, Any] = {"pattern": str(layer.pattern), "shape": list(shape), "dtype": dtype, "layout": layer.layout}
        if layer.layout == CONV2D:
            entry["kernel"] = list(layer.parameter.shape[2:] if isinstance(layer, NMWeight) else layer.stored_shape[2:])
        adapter = adapter_of(layer)
        if adapter is not None:
            entry["rank"] = int(adapter[0].shape[1])
        if not isinstance(layer, NMWeight) and "step" in layer._buffers:
            steps = layer.state_dict()["step"].shape[-1]  # there a part of a layer has the whole shape
            entry |= {"values": kind_of(layer.values), "group": 0 if steps == 1 else shape[-1] // steps}
        if (layer.columns if isinstance(layer, NMWeight) else layer._buffers.get("columns")) is not None:
            entry["columns"] = True
        about[name] = entry
    return about


def described(about: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The metadata of a file of ``save_pretrained`` with the table ``about``."""

    def least(a: dict[str, Any]) -> int:
        if rounds_experts(a) or is_dense(a):
            return 8 if rounds_experts(a) else 7
        return 5 if "values" in a else 4 if a["layout"] not in MATRICES else 3 if "columns" in a else 2 if "rank" in a else 1

    version = max(map(least, about.values()))
    return {"version": str(version), "layers": json.dumps(about)}


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
    made: dict[object, Tensor] = {}
    weights: dict[Layer, Tensor] = {}
    for layer in dict.fromkeys(sparse.values()):
        # an embedding and a head that share their integers are tied there too
        key: object = weight_key(layer) if isinstance(layer, CompressedLinear) else layer
        if key not in made:
            made[key] = _dense_weight(layer, gatherer)
        weights[layer] = made[key]
    tensors, patterns = plain_state(model), {}
    for name, layer in sparse.items():
        adapted = adapter_of(layer) is not None
        home = child_name(name) if isinstance(layer, CompressedStack) else name
        for part in (*(() if isinstance(layer, NMWeight) else BUFFERS), *(ADAPTER if adapted else ())):
            tensors.pop(f"{home}.{part}".removeprefix("."), None)
        tensors[weight_name(name, layer)] = weights[layer]  # one tensor for a layer with two names
        if not (adapted or has_dense_integers(layer)):
            patterns[name] = str(layer.pattern)
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
        CheckpointError: the file is missing, not a regular file, truncated or damaged, has another format or a newer version, or does not
            fit the model; or the model is sharded by ``fully_shard``. The model is then unchanged.
    """
    if fsdp_modules(model):
        raise CheckpointError(
            "load_compressed: fully_shard has sharded the model, and it cannot shard compressed weights, which are not Parameters. Load "
            "into a plain model on each rank; its dense layers can be sharded afterwards."
        )
    contents, table = opened(path)
    load(model, contents, table, keep_dense, fill_tied=contents.metadata["format"] == HUGGING_FACE)
    return model


def opened(path: str | os.PathLike[str]) -> tuple[Contents, dict[str, Any]]:
    """(tensors of a compressed file or folder by their present names, the table of its layers); errors as of ``load_compressed``."""
    contents = read_folder(path) if os.path.isdir(path) else read(path)
    about = contents.metadata
    hugging_face = about.get("format") == HUGGING_FACE
    if about.get("format") != FORMAT and not (hugging_face and "layers" in about):
        what = ""
        if "nm" in about:  # the patterns of the sparse layers, if there are any
            zeros = "" if about["nm"] == "{}" else "its zeros are N:M but "
            what = f"; {zeros}its weights are dense: load it with safetensors.torch.load_model"
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
    table, stored = contents.json("layers"), dict(contents.tensors)
    for alias, name in contents.json("aliases").items():
        lacks = not isinstance(name, str) or name not in stored
        if lacks or alias in stored:
            but = "which the file does not hold" if lacks else "but the file holds it itself"
            raise CheckpointError(f"{contents.path}: tensor {quote(alias)} is stored as an alias of {quote(name)}, {but}.")
        contents.tensors[alias] = stored[name]
    for name, entry in table.items():
        # up to version 5: ``fqn.weight.values``, and ``fqn.name.values`` of a stack of experts
        stack = home_of(name, entry)[0] != name
        old, new = (name, child_name(name)) if stack else (f"{name}.weight", name)
        for part in BUFFERS:
            if f"{old}.{part}" in contents.tensors and f"{new}.{part}" not in contents.tensors:
                contents.tensors[f"{new}.{part}"] = contents.tensors.pop(f"{old}.{part}")
        if is_dense(entry):  # up to version 6 they had indices, all 0
            contents.tensors.pop(f"{new}.indices", None)
        for empty in (name, f"{name}.weight") if hugging_face else ():
            if empty in stored and not stored[empty].numel():
                contents.tensors.pop(empty, None)  # makes loading without nmkernels fail
    return contents, table
