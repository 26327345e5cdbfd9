"""compress_: from trained sparse layers to deployed ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import ops
from ..pattern import RecipeError
from .adapter import adapter_of
from .chains import channel_parameters, find_chains, reorder_
from .compressed import CompressedLinear
from .linear import NMWeight
from .swap import replace_, switch_fast_paths

HOOKS = tuple(name for name in vars(nn.Module()) if name.startswith(("_forward_", "_backward_", "_is_full_backward_")))
"""What a deployed layer takes over. Hooks on state dicts are not: they speak of the dense layer's keys."""


def compress_(model: nn.Module, keep_dense: bool = False) -> nn.Module:
    """Replace every finished sparse layer of ``model`` by a CompressedLinear, in place, and return the model.

    Layers whose groups are no neighbours (``Complementary``) take their inputs in another order, or where ``find_chains`` proves that to
    be the same, the layers before them give their outputs in it. Forward and backward hooks, bias, adapter and mode are carried over; the
    dense weights are freed once nothing else holds them. Everything is checked before anything is replaced.

    Args:
        model: a model whose recipe has been finished (``handle.finish()``).
        keep_dense: see ``CompressedLinear``: dense weights are kept beside the compressed ones, for where they are faster.

    Raises:
        RecipeError: a layer is not finished, its weight is not N:M, or the model has no sparse layer.

    Example:
        >>> import nmkernels as nm
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        >>> handle = nm.sparsify_(model, "ste:2:4")
        >>> _ = handle.finish(allow_unused=True)
        >>> type(compress_(model)[0]).__name__
        'CompressedLinear'
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, NMWeight)}
    if not layers:
        raise RecipeError(
            "compress_: the model has no SparseLinear. Train it with sparsify_ and call handle.finish() first; "
            'a model pruned elsewhere is adopted by sparsify_(model, ASP(pattern, score="existing")) and handle.finish().'
        )
    for name, layer in layers.items():
        _check(name, layer)
    _fold_columns(model, layers)
    for layer in layers.values():
        with torch.no_grad():
            packed = ops.compress(layer.grouped.detach(), layer.pattern)
        layout = "conv1d" if layer.transposed else "linear"
        replace_(model, layer, deployed(layer, packed, layout, keep_dense, adapter_of(layer), layer.columns))
    switch_fast_paths(model)
    return model


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
    if not ops.is_nm(layer.grouped.detach(), layer.pattern):
        raise RecipeError(
            f"compress_: the weight of layer {name!r} was changed after finish() and is not {layer.pattern} any more. "
            "Turn the model dense with densify_, sparsify_ it again and finish that."
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
    """The CompressedLinear that takes the place of ``dense``: its bias, mode, and forward and backward hooks, with ``weight``."""
    bias = dense.bias
    assert bias is None or isinstance(bias, nn.Parameter)
    new = CompressedLinear(weight, bias, layout, keep_dense, adapter, columns)
    new.__dict__.update({name: dense.__dict__[name] for name in HOOKS})
    return new.train(dense.training)
