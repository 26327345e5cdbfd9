"""compress_ and decompress_: from trained sparse layers to compressed ones, and from those to dense layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from .. import ops
from ..layouts import CONV1D, CONV2D, as_stored
from ..pattern import RecipeError, ShapeError
from ..shards import is_sharded
from .adapter import adapter_of, folded
from .chains import channel_parameters, find_chains, reorder_
from .classes import computed_by
from .compressed import CompressedLinear, CompressedPart
from .conv import CompressedConv2d
from .experts import (
    CompressedExperts,
    CompressedStack,
    SparseExperts,
    StackedWeight,
    compressed_stack,
    deploy_stacks_,
    expand_stacks_,
    layer_name,
)
from .sharding import IN, check_mesh, fsdp_modules, reshard, split_along
from .swap import after_swap, replace_each_
from .weight import NMWeight

HOOKS = tuple(name for name in vars(nn.Module()) if name.startswith(("_forward_", "_backward_", "_is_full_backward_")))
"""Hooks that are copied to a deployed layer. Hooks on state dicts are not: they use the dense layer's keys."""


def compress_(model: nn.Module, keep_dense: bool = False) -> nn.Module:
    """Replace every finished sparse layer of ``model`` by a CompressedLinear or CompressedConv2d, in place, and return the model; experts
    modules become CompressedExperts.

    Layers whose groups are not contiguous (``Complementary``) reorder their inputs; where ``find_chains`` proves it equivalent, the layers
    before them reorder their outputs instead. Forward and backward hooks, bias, adapter and training mode are carried over; the dense
    weights are freed once nothing else refers to them. Everything is checked before anything is replaced.

    Under tensor parallelism (``parallelize_module``) every rank compresses its part, and the layers take and return DTensors as before.

    Args:
        model: a model whose recipe has been finished (``handle.finish()``).
        keep_dense: keep the dense weights too, for GEMMs where they are faster; see ``CompressedLinear``.

    Raises:
        RecipeError: a layer is not finished, its weight is not N:M or is sharded by ``fully_shard``, or the model has no sparse layer.
        ShapeError: a rank's part does not have whole bytes of indices.

    Example:
        >>> import nmkernels as nm
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        >>> handle = nm.sparsify_(model, "ste:2:4")
        >>> _ = handle.finish(allow_unused=True)
        >>> type(compress_(model)[0]).__name__
        'CompressedLinear'
    """
    layers = {layer_name(name, module): module for name, module in model.named_modules() if isinstance(module, NMWeight)}
    if not layers:
        raise RecipeError(
            "compress_: the model has no SparseLinear. Train it with sparsify_ and call handle.finish() first; "
            "for a model that was pruned elsewhere: nm.recipes.adopt(model).finish(allow_unused=True)."
        )
    reshard(model)  # after an evaluation FSDP2 leaves copies
    if fsdp_modules(model) and any(is_sharded(layer.parameter) for layer in layers.values()):
        raise RecipeError(
            "compress_: fully_shard has sharded the weights, and it cannot shard compressed ones, which are not Parameters. Call "
            "nm.save_compressed(model, path) on every rank, which compresses shard by shard, then nm.load_compressed(plain_model, path)."
        )
    for name, layer in layers.items():
        _check(name, layer)
    _fold_columns(model, layers)
    for module in [module for module in model.modules() if isinstance(module, SparseExperts)]:
        stacks = module.stacks
        deploy_stacks_(module, {key: compressed_stack(s.weight, s.layout, s.pattern, keep_dense) for key, s in stacks.items()})
    made: dict[nn.Module, nn.Module] = {}
    for layer in layers.values():
        if isinstance(layer, StackedWeight):
            continue
        with torch.no_grad():
            packed = ops.compress(layer.grouped.detach(), layer.pattern)
        made[layer] = deployed(layer, packed, layer.layout, keep_dense, adapter_of(layer), layer.columns)
    replace_each_(model, made)
    after_swap(model)
    return model


def _check(name: str, layer: NMWeight) -> None:
    if not name:
        raise RecipeError(
            "compress_: the model itself is one sparse layer and cannot be replaced in place; use CompressedLinear(ops.compress(...))."
        )
    if not layer.finished:
        raise RecipeError(
            f"compress_: layer {name!r} is still in training; call handle.finish() first, which makes its weight N:M. "
            "For a copy of the model (an EMA), load its state dict into the model passed to sparsify_, and finish that one."
        )
    reason = layer.computed("weight", "bias")
    if reason:
        raise RecipeError(f"compress_: layer {name!r} cannot be compressed: {reason}.")
    kind = type(layer.weight)
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and not is_sharded(layer.weight) and kind is not FakeTensor:
        raise RecipeError(
            f"compress_: the weight of layer {name!r} is a {kind.__module__}.{kind.__name__}: it was quantised or wrapped after finish(). "
            "A compressed layer holds floating-point values: compress_ before quantising, or run the quantised model as it is, with its "
            "zeros."
        )
    if not ops.is_nm(layer.grouped.detach(), layer.pattern):
        raise RecipeError(
            f"compress_: the weight of layer {name!r} was changed after finish() and is no longer {layer.pattern} (did "
            "LoRA merge into it without nmkernels.integrations.peft?). Call densify_, sparsify_ and finish again."
        )
    if is_sharded(layer.weight):
        _check_part(name, layer)


def _check_part(name: str, layer: NMWeight) -> None:
    """Raise ``NMError`` unless this rank's part of a sharded weight can be compressed by itself."""
    weight: Any = layer.weight
    check_mesh(f"compress_: layer {name!r}", weight)
    if split_along(weight, layer.layout) != IN:
        return
    p, cols, ways = layer.pattern, layer.shape[1], weight.device_mesh.size()
    step = p.m
    while p.kept(step) * p.index_bits % 8:
        step += p.m
    if layer.columns is not None:
        raise RecipeError(f"compress_: layer {name!r} reorders its inputs, which tensor parallelism has split.")
    if cols % (ways * step):
        raise ShapeError(
            f"compress_: layer {name!r} is split {ways} ways along in={cols}, which would cut bytes of packed {p} indices: in must be a "
            f"multiple of {ways * step}."
        )


def _fold_columns(model: nn.Module, layers: dict[str, NMWeight]) -> None:
    """Where layers need reordered inputs, reorder the outputs of the layers before them instead, if that is provably equivalent."""
    if all(layer.columns is None for layer in layers.values()):
        return
    for chain in find_chains(model)[0]:
        orders = [layers[name].columns for name in chain.consumers if name in layers]
        first = next((order for order in orders if order is not None), None)
        if first is None or any(order is None or not torch.equal(order, first) for order in orders):
            continue
        for p, dim in channel_parameters(model, chain):
            reorder_(p.detach(), dim, first)
        for name in set(chain.consumers) & set(layers):
            layers[name].columns = None


def deployed(
    dense: nn.Module,
    weight: ops.Compressed,
    layout: str = "linear",
    keep_dense: bool = False,
    adapter: tuple[Tensor, Tensor] | None = None,
    columns: Tensor | None = None,
) -> CompressedLinear:
    """A compressed layer with ``weight``, and the bias, training mode, and forward and backward hooks of ``dense``, which it replaces.

    If tensor parallelism has split the weight of ``dense``, ``weight`` is this rank's part of it.
    """
    bias, old = dense.bias, dense.weight
    assert (bias is None or isinstance(bias, nn.Parameter)) and isinstance(old, Tensor)
    new: CompressedLinear
    if layout == CONV2D:
        conv: Any = dense
        new = CompressedConv2d(weight, conv.kernel_size, bias, conv.stride, conv.padding, conv.dilation, conv.padding_mode, keep_dense)
    elif is_sharded(old):
        new = CompressedPart(weight, old, bias, layout, keep_dense, adapter, columns)
    else:
        new = CompressedLinear(weight, bias, layout, keep_dense, adapter, columns)
    new.__dict__.update({name: dense.__dict__[name] for name in HOOKS})
    return new.train(dense.training)


def decompress_(model: nn.Module) -> nn.Module:
    """Replace every compressed layer of ``model`` by an equivalent dense layer, in place, and return the model; experts modules become the
    model's original class again.

    The weight keeps its zeros, and an adapter is folded in, W + (L R)ᵀ / r; bias, training mode, and forward and backward hooks are
    carried over. Everything is checked before anything is replaced.

    Raises:
        RecipeError: a layer is split by tensor parallelism, its weight is offloaded, or the model itself is one layer.

    Example:
        >>> model = nn.Sequential(CompressedLinear(ops.compress(torch.tensor([[3.0, -4.0, 0.5, 0.0]]), "2:4")))
        >>> decompress_(model)[0].weight.tolist()
        [[3.0, -4.0, 0.0, 0.0]]
    """
    layers = {id(m): (name, m) for name, m in model.named_modules() if isinstance(m, (CompressedLinear, CompressedStack))}
    for name, layer in layers.values():
        if isinstance(layer, CompressedPart):
            raise RecipeError(f"decompress_: tensor parallelism has split layer {name!r}; save_compressed, and load into a plain model.")
        if layer.values.is_meta:
            raise RecipeError(f"decompress_: layer {name!r} has an offloaded weight; load the whole model into memory.")
        reason = computed_by(layer, "bias")
        if reason:
            raise RecipeError(f"decompress_: layer {name!r} cannot be made dense: {reason}.")
        if not name:
            raise RecipeError("decompress_: the model itself is one compressed layer and cannot be replaced in place; use its dense().")
    for module in [module for module in model.modules() if isinstance(module, CompressedExperts)]:
        expand_stacks_(module)
    replace_each_(model, {layer: _decompressed(layer) for _, layer in layers.values() if isinstance(layer, CompressedLinear)})
    if layers:
        after_swap(model)
    return model


@torch.no_grad()
def _decompressed(layer: CompressedLinear) -> nn.Module:
    weight, adapter = layer.dense(), layer.adapter
    weight = weight if adapter is None else folded(weight, *adapter)
    sizes = layer.in_features, layer.out_features
    dense: nn.Module
    if isinstance(layer, CompressedConv2d):
        geometry = layer.kernel_size, layer.stride, layer.padding, layer.dilation
        mode: Any = layer.padding_mode
        dense = nn.Conv2d(layer.in_channels, layer.out_channels, *geometry, 1, False, mode, device="meta")
    elif layer.layout == CONV1D:
        from transformers.pytorch_utils import Conv1D

        with torch.device("meta"):
            dense = Conv1D(*reversed(sizes))
    else:
        dense = nn.Linear(*sizes, False, device="meta")
    dense.register_parameter("weight", nn.Parameter(as_stored(weight, layer.layout, layer.stored_shape).contiguous()))
    dense.register_parameter("bias", layer.bias)
    dense.__dict__.update({name: layer.__dict__[name] for name in HOOKS})
    return dense.train(layer.training)
