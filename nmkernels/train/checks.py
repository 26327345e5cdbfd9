"""Requirements on the weights that a recipe trains: ``sparsify_`` and ``attach`` check them before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..layouts import MATRICES, ORDERS, REDUCED
from ..nn.sharding import check_mesh, data_dims
from ..nn.weight import NMWeight
from ..pattern import RecipeError, ShapeError
from ..recipes.contract import Recipe
from ..shards import is_sharded


def check_own(verb: str, layers: Mapping[str, NMWeight], *keys: str) -> None:
    """Raise ``RecipeError`` where the weight of a layer, or another tensor of ``keys``, is computed from others."""
    for name, layer in layers.items():
        if reason := layer.computed(*keys):
            raise RecipeError(f"{verb}: layer {name!r} is not as sparsify_ left it: {reason}.")


def check_flat(layers: dict[str, NMWeight]) -> None:
    """Raise ``RecipeError`` where weights were made one flat tensor."""
    check_own("attach", layers)
    for name, layer in layers.items():
        module, key = layer.home
        weight = module._parameters.get(key)
        if weight is None or weight.dim() != len(ORDERS[layer.layout]):
            raise RecipeError(
                f"attach: the weight of layer {name!r} was flattened, as FullyShardedDataParallel (FSDP1) does. Use "
                "torch.distributed.fsdp.fully_shard, which keeps Parameters apart."
            )


def check_whole(recipe: Recipe, layers: dict[str, NMWeight]) -> None:
    """Raise ``RecipeError`` where ``recipe`` needs weights whole and those of ``layers`` are sharded."""
    why, name = recipe.setup.needs_whole, next((name for name, layer in layers.items() if is_sharded(layer.parameter)), None)
    if why and name is not None:
        raise RecipeError(
            f"{type(recipe).__name__} {why}, and the weight of layer {name!r} is sharded. Train it with DistributedDataParallel; or take a "
            "recipe that runs on shards, such as SR-STE, STEP, S-STE, MdGf, SdGf, FST, or ASP by magnitude."
        )


def check_shards(layers: dict[str, NMWeight]) -> None:
    """Raise ``ShapeError`` where shards cut the groups of a mask, ``RecipeError`` where a layer cannot be sharded."""
    for name, layer in layers.items():
        weight: Any = layer.parameter
        if not is_sharded(weight):
            continue
        if layer.layout not in MATRICES:
            raise RecipeError(
                f"attach: the weight of layer {name!r}, a {type(layer).__name__}, is sharded; only those of linear layers can be. Train "
                "it with DistributedDataParallel, leave it out of fully_shard, or out of sparsify_ with filter_fn."
            )
        check_mesh(f"attach: layer {name!r}", weight, data_dims(layer))
        splits = {"out": 1, "in": 1}  # over all dimensions of the mesh
        for dim, placement in enumerate(weight.placements):
            if not placement.is_replicate():
                splits["in" if placement.dim == REDUCED[layer.layout] else "out"] *= weight.device_mesh.size(dim)
        traits = layer.final.traits
        if traits.columns is not None and splits["in"] > 1:
            raise ShapeError(
                f"attach: layer {name!r} is split along in, between weights of one group: the recipe's groups are not adjacent. "
                "Split out (fully_shard, ColwiseParallel), or leave the layer out with filter_fn."
            )
        for (which, parts), size in zip(splits.items(), layer.shape, strict=True):
            if (which == "in" or traits.transposable) and parts > 1 and size % (parts * layer.pattern.m):
                raise ShapeError(
                    f"attach: layer {name!r} is sharded {parts} ways along {which}={size}, which cuts groups of M={layer.pattern.m}: a "
                    f"multiple of {parts * layer.pattern.m} is needed. Shard the other dimension, on fewer ranks, or leave the layer out "
                    "with filter_fn."
                )


def check_learned(layers: dict[str, NMWeight], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise ``RecipeError`` unless the optimizers train everything that the recipe learns in addition to the weights."""
    owned = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    missing = [f"{name}.{key}" for name, layer in layers.items() for key, p in layer.learned().items() if id(p) not in owned]
    if missing:
        names = ", ".join(missing[:3]) + (" and more" if len(missing) > 3 else "")
        raise RecipeError(
            f"attach: no optimizer has {names}, which the recipe learns in addition to the weights. Build it from model.parameters() after "
            "sparsify_, as recipe.optimizer(model.parameters()) does."
        )
