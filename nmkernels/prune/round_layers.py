"""``compress_(model, values=..., data=...)``: sparse layers rounded with error compensation, block by block."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from .. import ops
from ..nn.compressed import CompressedLinear
from ..nn.weight import NMWeight
from ..pattern import NMError, RecipeError
from ..shards import is_sharded
from ..train.layer_names import listed
from ..train.sparsify import LayerCandidate
from .data import batches_of, call
from .hessians import Hessians, exact_gemms, problems_of
from .prune import SCARCE, shared
from .ranks import agree, gathered, ranks, together
from .relay import Relay, Unit
from .rounding import round_values

Weight = NMWeight | CompressedLinear
"""A finished sparse layer, or a compressed one with floating-point values."""

SAID = {
    "prune_:": "compress_:",
    "; forward=lambda model, batch: ... calls it in another way": "",
    "pass blocks=[] to prune without blocks": "pass batches that run every block",
}
"""What messages of functions that ``prune_`` uses too say, and what they say here."""


def round_on_data(
    model: nn.Module, layers: Mapping[str, Weight], forms: Mapping[nn.Module, tuple[str, int | None]], data: Iterable[Any]
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
    model: nn.Module, layers: Mapping[str, Weight], forms: Mapping[nn.Module, tuple[str, int | None]], data: Iterable[Any]
) -> dict[nn.Module, ops.Compressed]:
    chosen = [LayerCandidate(name, layer, layer.shape, layout=layer.layout) for name, layer in layers.items()]
    with together():
        for name, layer in layers.items():
            if any(is_sharded(t) for t in (*layer.parameters(), *layer.buffers())):
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
                for p in problems:
                    h, tokens = means[p.source]
                    few += [p.name] if tokens < SCARCE * p.shape[1] else []
                    if p.name in mine:
                        solved[p.name] = _one(layers[p.name], h, tokens, *forms[layers[p.name]])
            for part in gathered(solved):
                rounded |= {layers[name]: weight.to(layers[name].weight.device) for name, weight in part.items()}
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


def _one(layer: Weight, h: Tensor, tokens: int, values: str, group: int | None) -> ops.Compressed:
    """The rounded weight of a layer whose inputs have the Hessian ``h``."""
    if isinstance(layer, CompressedLinear):
        packed, order = layer.weight, layer.order
    else:
        packed, order = layer.as_pruned() or ops.compress(layer.grouped.detach(), layer.pattern), layer.columns
    if order is not None:
        h = h[order.long()][:, order.long()]
    with exact_gemms(h.device):
        return round_values(packed, values, group, h, tokens)


@contextmanager
def _using(layer: Weight, rounded: ops.Compressed) -> Iterator[None]:
    """The layer multiplies the rounded weight inside."""
    if isinstance(layer, CompressedLinear):
        values, layer.values = layer.values, ops.dequantize_values(rounded, layer.values.dtype).values
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
