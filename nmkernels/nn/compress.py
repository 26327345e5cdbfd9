"""compress_ and decompress_: from trained sparse layers to compressed ones, and from those to dense layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from .. import ops
from ..arguments import whole_number
from ..layouts import CONV1D, CONV2D, EMBEDDING, as_matrix, as_stored
from ..ops.compress import group_of
from ..ops.integers import BITS
from ..pattern import OptionError, RecipeError, ShapeError
from ..shards import is_sharded, local
from .adapter import adapter_of, folded
from .chains import channel_parameters, find_chains, reorder_
from .classes import computed_by
from .compressed import CompressedLinear, CompressedPart
from .conv import CompressedConv2d
from .dense import CompressedEmbedding, dense_integers, dense_layers, dense_layout, has_dense_integers, too_large, weight_key
from .experts import (
    CompressedExperts,
    CompressedStack,
    SparseExperts,
    StackedWeight,
    compress_stacks_,
    expand_stacks_,
    layer_name,
)
from .sharding import IN, check_mesh, fsdp_modules, reshard, split_along
from .swap import after_swap, replace_each_
from .weight import NMWeight

HOOKS = tuple(name for name in vars(nn.Module()) if name.startswith(("_forward_", "_backward_", "_is_full_backward_")))
"""Hooks that are copied to a compressed layer. Hooks on state dicts are not: they use the dense layer's keys."""


MOST_NAMED = 5
"""How many layers a warning names."""
data_rounders: list[Callable[..., dict[nn.Module, ops.Compressed]]] = []
"""What rounds layers on data; ``nmkernels.prune`` registers its ``round_on_data`` here."""
FLOATING = "convolutions keep floating-point values, not {}: {}."
Rounded = NMWeight | CompressedLinear | CompressedStack
"""What has values that may become integers."""


def compress_(
    model: nn.Module,
    keep_dense: bool = False,
    values: str | None = None,
    group: int | None = None,
    *,
    data: Iterable[Any] | None = None,
    dense: Sequence[str] = (),
) -> nn.Module:
    """Replace every finished sparse layer of ``model`` by a CompressedLinear or CompressedConv2d, in place, and return the model; experts
    modules become CompressedExperts.

    Layers whose groups are not contiguous (``Complementary``) reorder their inputs; where ``find_chains`` proves it equivalent, the layers
    before them reorder their outputs instead. Forward and backward hooks, bias, adapter and training mode are carried over; the dense
    weights are freed once nothing else refers to them. Everything is checked before anything is replaced.

    Under tensor parallelism (``parallelize_module``) every rank compresses its part, and the layers take and return DTensors as before.

    With ``values`` the kept values of linear layers and experts become integers with a step (``ops.quantize_values``), also in layers that
    are compressed already, which stay the same modules. Inputs stay in their dtype. Convolutions keep floating-point values, with a
    warning that names them. ``nm.quantization_report`` shows beforehand what rounding costs in each layer.

    Values are rounded to the nearest, or with ``data`` so that integers make up for each other's errors: the positions of kept values are
    held, and ‖X(W − Q)ᵀ‖² is made small for the inputs X that each layer gets, block by block, the later ones from layers that are rounded
    already. In 4 bits that loses far less. A layer that ``prune_(..., values=...)`` has made, and nothing changed since, is rounded so
    without data.

    With ``dense`` the weights of the layers that it names become integers too, without zeros, to the nearest. An ``nn.Embedding`` then
    decodes only rows that it returns; an embedding and an output head that share a weight share its integers. Layers that are compressed
    already stay as they are, so that a second call may give these layers other values than the first one gave the sparse layers.
    ``prune_`` and ``sparsify_`` leave embeddings and output heads dense; in a small model those hold most bytes.

    Bits per dense weight: 2:4 has 9 in 16-bit floats, 5 in int8, and 3.125 in int4 in groups of 128 (1:4: 2.5 and 1.625; 1:8: 1.5 and
    1.125). Dense int4 has 4.125, so 2:4 in int4 is 25 % smaller than dense int4, and 2:4 in int8 is larger than it.

    Args:
        model: a model whose recipe has been finished (``handle.finish()``); with ``values``, or one with compressed layers.
        keep_dense: keep the dense weights too, for GEMMs where they are faster; see ``CompressedLinear``.
        values: ``"int8"``, ``"int4"``, or ``"float"`` for floating-point values. Default: for each layer what ``prune_`` was called with,
            else floating-point values.
        group: dense columns that share a step; 0: all of a row. Default: 0 for ``"int8"``; for ``"int4"`` the first of 128, 64, 32 that
            fits, else 0.
        data: with integers: batches as for ``prune_``, 8 tokens per input feature or more; under ``torch.distributed`` each rank's share.
        dense: dense ``nn.Linear`` and ``nn.Embedding`` layers to round too: full names, parts of names between dots, or either with shell
            wildcards (``*``, ``?``).

    Raises:
        RecipeError: a layer is not finished, its weight is not N:M or is sharded by ``fully_shard``, has other integers already, or has NaN
            or infinite values to round, or values that overflow once rounded; or the model has no sparse layer, or cannot run on
            ``data``; or ``dense`` names no dense layer, or one that cannot be rounded.
        OptionError: ``values`` is unknown or missing, or ``group`` does not fit a layer.
        ShapeError: a rank's part does not have whole bytes of indices or integers.

    Example:
        >>> import nmkernels as nm
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        >>> handle = nm.sparsify_(model, "ste:2:4")
        >>> _ = handle.finish(allow_unused=True)
        >>> type(compress_(model)[0]).__name__
        'CompressedLinear'
    """
    if values not in (None, "float", *BITS):
        raise OptionError(f"compress_: values={values!r} is unknown; choose one of {', '.join(map(repr, BITS))}, 'float', or None.")
    chosen = dense_layers("compress_", model, dense, values, group)
    layers = {layer_name(name, module): module for name, module in model.named_modules() if isinstance(module, NMWeight)}
    if values is None and group is None:
        rounds: dict[str, Rounded] = {name: layer for name, layer in layers.items() if layer.integers is not None}
    else:
        rounds = rounded_layers("compress_", model, None if values == "float" else values, group)
    if chosen:
        rounds = {name: one for name, one in rounds.items() if isinstance(one, NMWeight)}
    forms: dict[nn.Module, Any] = {one: (values, group) if values is not None else one.integers for one in rounds.values()}
    if not (layers or rounds or chosen):
        if any(isinstance(module, (CompressedLinear, CompressedStack)) for module in model.modules()):
            raise RecipeError("compress_: all sparse layers are compressed already. nm.densify_(model) makes them dense again.")
        raise RecipeError(
            "compress_: the model has no SparseLinear. Train it with sparsify_ and call handle.finish() first; "
            "for a model that was pruned elsewhere: nm.recipes.adopt(model).finish(allow_unused=True)."
        )
    reshard(model)  # after an evaluation FSDP2 leaves copies
    if fsdp_modules(model) and any(is_sharded(layer.parameter) for layer in layers.values()):
        integers = next((form[0] for form in forms.values()), None)
        raise RecipeError(
            "compress_: fully_shard has sharded the weights, and it cannot shard compressed ones, which are not Parameters. Call "
            "nm.save_compressed(model, path) on every rank, which compresses shard by shard, then nm.load_compressed(plain_model, path)"
            f"{f' and compress_(plain_model, values={integers!r})' if integers else ''}."
        )
    pruned = {layer: _checked(name, layer) for name, layer in layers.items()}
    for name, one in rounds.items():
        check_rounding("compress_", name, one, *forms[one])
    made: dict[nn.Module, ops.Compressed] = {}
    if data is None:
        _fold_columns(model, layers)  # which reorders rows, and those of ``made`` would have to follow
    else:
        if not (forms or chosen):
            raise OptionError("compress_: data= is for values='int8' or 'int4'; floating-point values are not rounded.")
        floats = {name: one for name, one in rounds.items() if isinstance(one, NMWeight) or one.weight.step is None}
        made = data_rounders[0](model, floats, forms, data) if floats else {}

    def packed(layer: NMWeight) -> ops.Compressed:
        if layer in made:
            return made[layer]
        with torch.no_grad():
            weight = pruned[layer] or ops.compress(layer.grouped.detach(), layer.pattern)
            if layer not in forms:
                return weight
            return (_as_rounded(layer, *forms[layer]) if pruned[layer] else None) or ops.quantize_values(weight, *forms[layer])

    rounded = rounded_dense(chosen, str(values), group, keep_dense)  # which may fail for want of memory
    for module in [module for module in model.modules() if isinstance(module, SparseExperts)]:
        stacks = module.stacks.items()
        made_of = {key: CompressedStack(packed(s), s.experts, s.layout, keep_dense, s.weight.dtype) for key, s in stacks}
        compress_stacks_(module, made_of)
    single = [layer for layer in layers.values() if not isinstance(layer, StackedWeight)]
    replace_each_(model, {s: compressed_like(s, packed(s), s.layout, keep_dense, adapter_of(s), s.columns) for s in single})
    for one in rounds.values():
        if not isinstance(one, NMWeight):
            one.keep_dense = one.keep_dense or keep_dense
            if one.weight.step is None:
                one.round_(made.get(one) or ops.quantize_values(one.weight, *forms[one]))
    replace_each_(model, rounded)
    after_swap(model)
    return model


def rounded_layers(verb: str, model: nn.Module, values: str | None, group: int | None) -> dict[str, Rounded]:
    """The sparse layers of ``model``, by name, whose values become ``values``, or are that already; a warning names convolutions."""
    check_values(verb, values, group)
    if values is None:
        return {}
    layers: dict[str, Rounded] = {}
    floating = []
    for name, module in model.named_modules():
        if not isinstance(module, (NMWeight, CompressedLinear, CompressedStack)) or has_dense_integers(module):
            continue
        if module.layout == CONV2D:
            floating.append(name)
        else:
            layers[layer_name(name, module)] = module
    if floating:
        warnings.warn(f"{verb}: {FLOATING.format(values, names_of(floating))}", stacklevel=3)
    return layers


@torch.no_grad()
def rounded_dense(chosen: Mapping[str, nn.Module], values: str, group: int | None, keep_dense: bool) -> dict[nn.Module, nn.Module]:
    """dense layer → compressed one with its weight rounded, for those of ``dense_layers``; one form for layers that share a weight."""
    forms: dict[int, ops.Compressed] = {}
    made: dict[nn.Module, nn.Module] = {}
    for module in dict.fromkeys(chosen.values()):
        weight, layout = module._parameters["weight"], dense_layout(module)
        assert weight is not None
        if id(weight) not in forms:
            forms[id(weight)] = dense_integers(as_matrix(weight.detach(), layout), values, group)
        made[module] = compressed_like(module, forms[id(weight)], layout, keep_dense)
    return made


def check_values(verb: str, values: str | None, group: int | None) -> int | None:
    """``group`` as an int or None; raise ``OptionError`` unless ``values`` is a kind of integers, or None without a ``group``."""
    if values not in (None, *BITS):
        raise OptionError(f"{verb}: values={values!r} is unknown; choose one of {', '.join(map(repr, BITS))}, or None.")
    if values is None and group is not None:
        raise OptionError(f"{verb}: group={group} is for values='int8' or 'int4'.")
    return group if group is None else whole_number(OptionError, f"{verb}: group", group, least=0)


def names_of(layers: list[str]) -> str:
    """The first names of ``layers``, for a warning."""
    return f"{', '.join(layers[:MOST_NAMED])}{f' and {len(layers) - MOST_NAMED} more' if len(layers) > MOST_NAMED else ''}"


def check_rounding(verb: str, name: str, layer: Rounded, values: Any, group: int | None) -> None:
    """Raise ``NMError`` unless the values of ``layer`` can be rounded, or are such integers already."""
    what = f"{verb}: layer {name!r}"
    if not isinstance(layer, NMWeight) and layer.weight.step is not None:
        present = layer.weight
        wanted = present.group if group in (None, present.shape[1]) and not present.group else group
        if present.kind != values or wanted not in (None, present.group):
            steps = f"a step per {present.group} columns" if present.group else "a step per row"
            raise RecipeError(
                f"{what} has {present.kind} values already, {steps}. Rounding them again would add to their error: compress_ the floating-"
                "point weights, from a file or dense checkpoint. nm.densify_(model) gives dense layers with the rounded weights."
            )
        return
    if not isinstance(layer, NMWeight):
        weights, cols = layer.values, layer.in_features
    else:
        if not layer.finished:
            raise RecipeError(f"{what} is still in training; call handle.finish() first, which makes its weight N:M.")
        weights, cols = local(layer.parameter.detach()), layer.grouped.shape[1]
    group_of(what, values, group, layer.pattern, cols)
    if weights.is_meta:
        raise RecipeError(f"{what} has no data to round: its weight is on the meta device, or offloaded.")
    if not isinstance(weights, FakeTensor):
        if not bool(weights.isfinite().all()):
            raise RecipeError(f"{what} has NaN or infinite values, which no integers with a step can hold.")
        if problem := too_large(weights, values, lambda: _nearest(layer, values, group).dense(weights.dtype)):
            raise RecipeError(f"{what} has {problem}.")
    sharded = isinstance(layer, NMWeight) and is_sharded(layer.weight)
    along = split_along(layer.weight, layer.layout) if sharded else getattr(layer, "split", "")
    if values == "int4" and layer.pattern.kept(cols) % 2 and along == IN:
        raise ShapeError(f"{what} has {layer.pattern.kept(cols)} values per row on each rank, which would cut a byte of two in half.")


def _nearest(layer: Rounded, values: str, group: int | None) -> ops.Compressed:
    """The weight of ``layer`` rounded to the nearest integers."""
    weight = ops.compress(layer.grouped.detach(), layer.pattern) if isinstance(layer, NMWeight) else layer.weight
    return ops.quantize_values(weight, values, group)


def _checked(name: str, layer: NMWeight) -> ops.Compressed | None:
    """Raise ``NMError`` unless ``layer`` can be compressed; returns its compressed weight if ``prune_`` has left it."""
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
    packed = layer.as_pruned()
    if packed is None and not ops.is_nm(layer.grouped.detach(), layer.pattern):
        raise RecipeError(
            f"compress_: the weight of layer {name!r} was changed after finish() and is no longer {layer.pattern} (did "
            "LoRA merge into it without nmkernels.integrations.peft?). Call densify_, sparsify_ and finish again."
        )
    if is_sharded(layer.weight):
        _check_part(name, layer)
    return packed


def _as_rounded(layer: NMWeight, values: str, group: int | None) -> ops.Compressed | None:
    """The integers that ``prune_`` has made of the weight that it left, if they are of this kind."""
    rounded = layer.effective.rounded
    if rounded is None or rounded.kind != values:
        return None
    wanted = group_of("compress_", values, group, rounded.pattern, rounded.shape[1])
    return rounded.to(layer.weight.device) if wanted in (rounded.group, rounded.group or rounded.shape[1]) else None


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


def compressed_like(
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
    bias, old = getattr(dense, "bias", None), dense.weight
    assert (bias is None or isinstance(bias, nn.Parameter)) and isinstance(old, Tensor)
    new: CompressedLinear
    if layout == CONV2D:
        conv: Any = dense
        new = CompressedConv2d(weight, conv.kernel_size, bias, conv.stride, conv.padding, conv.dilation, conv.padding_mode, keep_dense)
    elif layout == EMBEDDING:
        embedding: Any = dense
        new = CompressedEmbedding(weight, embedding.padding_idx, old.dtype)
        new.sparse, new.scale_grad_by_freq = embedding.sparse, embedding.scale_grad_by_freq
    elif is_sharded(old):
        new = CompressedPart(weight, old, bias, layout, keep_dense, adapter, columns)
    else:
        new = CompressedLinear(weight, bias, layout, keep_dense, adapter, columns, old.dtype)
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
    tied: dict[object, nn.Parameter] = {}
    replace_each_(model, {layer: _decompressed(layer, tied) for _, layer in layers.values() if isinstance(layer, CompressedLinear)})
    if layers:
        after_swap(model)
    return model


@torch.no_grad()
def _decompressed(layer: CompressedLinear, tied: dict[object, nn.Parameter]) -> nn.Module:
    """``tied``: the dense weights made so far, by ``weight_key``."""
    key, adapter = weight_key(layer), layer.adapter
    if key not in tied:
        weight = layer.dense() if adapter is None else folded(layer.dense(), *adapter)
        tied[key] = nn.Parameter(as_stored(weight, layer.layout, layer.stored_shape).contiguous())
    parameter = tied[key]
    sizes, bias = (layer.in_features, layer.out_features), layer.bias
    dense: nn.Module
    if isinstance(layer, CompressedConv2d):
        geometry = layer.kernel_size, layer.stride, layer.padding, layer.dilation
        mode: Any = layer.padding_mode
        dense = nn.Conv2d(layer.in_channels, layer.out_channels, *geometry, 1, False, mode, device="meta")
    elif layer.layout == CONV1D:
        from transformers.pytorch_utils import Conv1D

        with torch.device("meta"):
            dense = Conv1D(*reversed(sizes))
        if bias is None:  # Conv1D adds one always
            bias = nn.Parameter(parameter.new_zeros(sizes[1]))
    elif isinstance(layer, CompressedEmbedding):
        frequent = layer.scale_grad_by_freq
        dense = nn.Embedding(*layer.shape, layer.padding_idx, scale_grad_by_freq=frequent, sparse=layer.sparse, device="meta")
    else:
        dense = nn.Linear(*sizes, False, device="meta")
    dense.register_parameter("weight", parameter)
    if layer.layout != EMBEDDING:
        dense.register_parameter("bias", bias)
    dense.__dict__.update({name: layer.__dict__[name] for name in HOOKS})
    return dense.train(layer.training)
