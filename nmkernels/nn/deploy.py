"""compress_: from trained sparse layers to deployed ones."""

from __future__ import annotations

from collections.abc import Callable
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
from .gather import fsdp_modules, reshard
from .linear import NMWeight
from .parallel import IN, check_mesh, split_along
from .swap import replace_each_, switch_fast_paths

HOOKS = tuple(name for name in vars(nn.Module()) if name.startswith(("_forward_", "_backward_", "_is_full_backward_")))
"""What a deployed layer takes over. Hooks on state dicts are not: they speak of the dense layer's keys."""

AFTER: list[Callable[[nn.Module], object]] = []
"""What integrations have done with a model whose layers were compressed, or are dense again: other libraries keep books of that."""


def compress_(model: nn.Module, keep_dense: bool = False) -> nn.Module:
    """Replace every finished sparse layer of ``model`` by a CompressedLinear or CompressedConv2d, in place, and return the model; experts
    modules become CompressedExperts.

    Layers whose groups are no neighbours (``Complementary``) take their inputs in another order, or where ``find_chains`` proves that to
    be the same, the layers before them give their outputs in it. Forward and backward hooks, bias, adapter and mode are carried over; the
    dense weights are freed once nothing else holds them. Everything is checked before anything is replaced.

    Under tensor parallelism (``parallelize_module``) every rank compresses its part, and the layers take and give DTensors as before.

    Args:
        model: a model whose recipe has been finished (``handle.finish()``).
        keep_dense: see ``CompressedLinear``: dense weights are kept beside the compressed ones, for where they are faster.

    Raises:
        RecipeError: a layer is not finished, its weight is not N:M or sharded by ``fully_shard``, or there is none.
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
            "a model pruned elsewhere is adopted by nm.recipes.adopt(model).finish(allow_unused=True)."
        )
    reshard(model)  # after an evaluation FSDP2 leaves copies
    if fsdp_modules(model) and any(is_sharded(layer.parameter) for layer in layers.values()):
        raise RecipeError(
            "compress_: fully_shard has sharded the weights, and it shards Parameters only, which packed ones are not. Call "
            "nm.save_compressed(model, path) on every rank, which compresses shard by shard, and nm.load_compressed(plain_model, path)."
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
    switch_fast_paths(model)
    tell(model)
    return model


def tell(model: nn.Module) -> None:
    """Call what is registered in ``AFTER``: compressed layers have come into ``model``, or gone from it."""
    for then in AFTER:
        then(model)


def _check(name: str, layer: NMWeight) -> None:
    if not name:
        raise RecipeError(
            "compress_: the model itself is one sparse layer and cannot be replaced in place; use CompressedLinear(ops.compress(...))."
        )
    if not layer.finished:
        raise RecipeError(
            f"compress_: layer {name!r} is still in training; call handle.finish() first, which leaves its weight N:M. "
            "For a copy of the model (an EMA), load its state dict into the model that was given to sparsify_, and finish that."
        )
    said = layer.computed("weight", "bias")
    if said:
        raise RecipeError(f"compress_: layer {name!r} cannot be compressed: {said}.")
    kind = type(layer.weight)
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and not is_sharded(layer.weight) and kind is not FakeTensor:
        raise RecipeError(
            f"compress_: the weight of layer {name!r} is a {kind.__module__}.{kind.__name__}: it was quantised or wrapped after finish(). "
            "A compressed layer holds floating-point values, so compress_ without quantising; or run the quantised model as it is, its "
            "zeros are there."
        )
    if not ops.is_nm(layer.grouped.detach(), layer.pattern):
        raise RecipeError(
            f"compress_: the weight of layer {name!r} was changed after finish() and is not {layer.pattern} any more. "
            "Turn the model dense with densify_, sparsify_ it again and finish that."
        )
    if is_sharded(layer.weight):
        _check_part(name, layer)


def _check_part(name: str, layer: NMWeight) -> None:
    """Raise ``NMError`` unless the layer's part of a weight that ranks share can be compressed by itself."""
    weight: Any = layer.weight
    check_mesh(f"compress_: layer {name!r}", weight)
    if split_along(weight, layer.reduced) != IN:
        return
    p, cols, ways = layer.pattern, layer.shape[1], weight.device_mesh.size()
    step = p.m
    while p.kept(step) * p.index_bits % 8:
        step += p.m
    if layer.columns is not None:
        raise RecipeError(f"compress_: layer {name!r} takes its inputs in another order, and tensor parallelism has split them.")
    if cols % (ways * step):
        raise ShapeError(
            f"compress_: layer {name!r} is split {ways} ways along in={cols}, which cuts the bytes of packed indices at {p}: a multiple of "
            f"{ways * step} is needed."
        )


def _fold_columns(model: nn.Module, layers: dict[str, NMWeight]) -> None:
    """Where layers want their inputs in another order and that can be proved to be the same, let the layers before give it to them."""
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
    """The compressed layer that takes the place of ``dense``: its bias, mode, and forward and backward hooks, with ``weight``.

    Where the weight of ``dense`` is split by tensor parallelism, ``weight`` is this rank's part of it.
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
    """Replace every compressed layer of ``model`` by the dense one that computes the same, in place, and return the model; experts
    modules are the model's own again.

    The weight has its zeros, and an adapter is folded in, W + (L R)ᵀ / r; bias, mode, and forward and backward hooks are carried over.
    Everything is checked before anything is replaced.

    Raises:
        RecipeError: a layer is split by tensor parallelism, its weight lies elsewhere (offloaded), or the model itself is one layer.

    Example:
        >>> model = nn.Sequential(CompressedLinear(ops.compress(torch.tensor([[3.0, -4.0, 0.5, 0.0]]), "2:4")))
        >>> decompress_(model)[0].weight.tolist()
        [[3.0, -4.0, 0.0, 0.0]]
    """
    layers = {id(m): (name, m) for name, m in model.named_modules() if isinstance(m, (CompressedLinear, CompressedStack))}
    for name, layer in layers.values():
        if isinstance(layer, CompressedPart):
            raise RecipeError(f"decompress_: tensor parallelism has split layer {name!r}; save it compressed and load a plain model.")
        if layer.values.is_meta:
            raise RecipeError(f"decompress_: layer {name!r} has its weight elsewhere (offloaded); load the model whole.")
        said = computed_by(layer, "bias")
        if said:
            raise RecipeError(f"decompress_: layer {name!r} cannot be made dense: {said}.")
        if not name:
            raise RecipeError("decompress_: the model itself is one compressed layer and cannot be replaced in place; use its dense().")
    for module in [module for module in model.modules() if isinstance(module, CompressedExperts)]:
        expand_stacks_(module)
    replace_each_(model, {layer: _decompressed(layer) for _, layer in layers.values() if isinstance(layer, CompressedLinear)})
    if layers:
        switch_fast_paths(model)
        tell(model)
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
        from transformers.pytorch_utils import Conv1D  # whose layer it was

        with torch.device("meta"):
            dense = Conv1D(*reversed(sizes))
    else:
        dense = nn.Linear(*sizes, False, device="meta")
    dense.register_parameter("weight", nn.Parameter(as_stored(weight, layer.layout, layer.stored_shape).contiguous()))
    dense.register_parameter("bias", layer.bias)
    dense.__dict__.update({name: layer.__dict__[name] for name in HOOKS})
    return dense.train(layer.training)
