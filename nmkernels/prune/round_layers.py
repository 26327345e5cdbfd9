"""``compress_(model, values=..., data=...)``: sparse layers rounded with error compensation, block by block."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from .. import ops
from ..nn.compress import Rounded
from ..nn.experts import CompressedStack, StackedWeight, matrices_of
from ..nn.weight import NMWeight
from ..pattern import NMError, RecipeError
from ..shards import is_sharded
from ..train.layer_names import listed
from ..train.sparsify import LayerCandidate
from .data import batches_of, call
from .hessians import Hessians, exact_gemms, joined, problems_of
from .prune import SCARCE, shared
from .ranks import agree, gathered, ranks, together
from .relay import Relay, Unit
from .rounding import round_values

SAID = {
    "prune_:": "compress_:",
    "; forward=lambda model, batch: ... calls it in another way": "",
    "pass blocks=[] to prune without blocks": "pass batches that run every block",
}
"""What messages of functions that ``prune_`` uses too say, and what they say here."""


def round_on_data(
    model: nn.Module, layers: Mapping[str, Rounded], forms: Mapping[nn.Module, tuple[str, int | None]], data: Iterable[Any]
) -> dict[nn.Module, ops.Compressed]:
    """The weights of ``layers`` rounded to ``forms``, (values, group), each for the inputs that it gets in ``data`` from rounded layers
    before it. The model is then as it was, also after an error.

    Raises:
        RecipeError: the model cannot run a batch, the data is empty, or a weight is sharded.
    """
    try:
        return _rounded(model, layers, forms, data)
    except NMError as error:
        text = str(error)
        for prune, compress in SAID.items():
            text = text.replace(prune, compress)
        raise type(error)(text) from error


def _rounded(
    model: nn.Module, layers: Mapping[str, Rounded], forms: Mapping[nn.Module, tuple[str, int | None]], data: Iterable[Any]
) -> dict[nn.Module, ops.Compressed]:
    chosen = [_candidate(model, name, layer) for name, layer in layers.items()]
    with together():
        for name, layer in layers.items():
            own = [layer.parameter] if isinstance(layer, StackedWeight) else layer.parameters()
            if any(is_sharded(t) for t in (*own, *layer.buffers())):
                raise RecipeError(f"compress_: layer {name!r} is sharded, and data= takes whole weights; compress_ a plain model.")
        relay = Relay(model, chosen, batches_of(data, model), call)
    rounded: dict[nn.Module, ops.Compressed] = {}
    few: list[str] = []
    with relay.running(), ExitStack() as live:
        with together():
            relay.trace()
        relay.whole = next(filter(None, gathered(relay.whole)), "")
        agree("orders of layers in their first batches", [(unit.name, [c.name for c in unit.layers]) for unit in relay.units])
        for unit in [*relay.units, *([Unit("", relay.idle)] if relay.idle else [])]:  # later batches may reach those
            problems = [p for c in unit.layers for p in problems_of(c, relay.sources[c.name])]
            hessians = Hessians(problems)
            with together(), hessians.collecting(relay.tokens):
                relay.run(unit)
            hessians.warn()
            hessians.share()
            mine, solved = shared(problems, *ranks()), dict[str, ops.Compressed]()
            with together():
                means = {source: hessians.mean(source) for source in dict.fromkeys(p.source for p in problems)}
                for c in unit.layers:
                    parts = [p for p in problems if p.candidate is c]
                    layer, matrices = layers[c.name], list[ops.Compressed]()
                    for p in parts:
                        h, tokens = means[p.source]
                        few += [p.name] if tokens < SCARCE * p.shape[1] else []
                        if p.name in mine:
                            matrices = matrices or matrices_of(_packed(layer), len(parts))
                            solved[p.name] = _one(layer, matrices[p.expert or 0], h, tokens, *forms[layer])
            solved = {name: weight for part in gathered(solved) for name, weight in part.items()}
            for c in unit.layers:
                device = layers[c.name].weight.device  # other ranks have others
                matrices = [solved[p.name].to(device) for p in problems if p.candidate is c]
                rounded[layers[c.name]] = joined(matrices, c.matrix_shape)
            with ExitStack() as inside:
                answers = unit.block is not None and not relay.whole
                for c in unit.layers:
                    (inside if answers else live).enter_context(_using(layers[c.name], rounded[layers[c.name]]))
                if answers:
                    with together():
                        relay.run(unit)
            relay.finish(unit)
    if few:
        warnings.warn(
            f"compress_: {listed(few)} got fewer than {SCARCE} tokens per input feature, too few to make up for errors reliably; pass more "
            "data.",
            stacklevel=5,
        )
    return rounded


def _candidate(model: nn.Module, name: str, layer: Rounded) -> LayerCandidate:
    if not isinstance(layer, (StackedWeight, CompressedStack)):
        return LayerCandidate(name, layer, layer.shape, layout=layer.layout)
    home, _, key = name.rpartition(".")
    shape = tuple(layer.weight.shape) if isinstance(layer, StackedWeight) else layer.stored_shape
    return LayerCandidate(name, model.get_submodule(home), shape, layout=layer.layout, key=key)


def _packed(layer: Rounded) -> ops.Compressed:
    """The weight of a layer with floating-point values."""
    if isinstance(layer, NMWeight):
        return layer.as_pruned() or ops.compress(layer.grouped.detach(), layer.pattern)
    return layer.weight


def _one(layer: Rounded, packed: ops.Compressed, h: Tensor, tokens: int, values: str, group: int | None) -> ops.Compressed:
    """``packed``, a matrix of ``layer`` whose inputs have the Hessian ``h``, rounded."""
    order = layer.columns if isinstance(layer, NMWeight) else layer._buffers.get("columns")
    if order is not None:
        h = h[order.long()][:, order.long()]
    with exact_gemms(h.device):
        return round_values(packed, values, group, h, tokens)


@contextmanager
def _using(layer: Rounded, rounded: ops.Compressed) -> Iterator[None]:
    """The layer multiplies the rounded weight inside."""
    if not isinstance(layer, NMWeight):
        values, layer.values = layer.values, ops.dequantize_values(rounded, layer.values.dtype).values.view_as(layer.values)
        try:
            yield
        finally:
            layer.values = values
        return
    weight, dense = layer.master.detach(), rounded.dense()
    before = weight.clone()
    weight.copy_(dense if layer.columns is None else dense[:, layer.columns.argsort()])
    layer.drop()
    try:
        yield
    finally:
        weight.copy_(before)
        layer.drop()
