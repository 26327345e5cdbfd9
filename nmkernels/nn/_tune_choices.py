"""The products of a model's layers, and the fastest way to do each: dense, or one backend's kernel."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from ..autograd import choice
from ..autograd.choice import Product, Timer
from ._autocast import autocast_dtype, castable
from ._tune_report import Tuned
from .compressed import CompressedLinear
from .linear import NMWeight

log = logging.getLogger("nmkernels.tune")

DEVICES = ("cpu", "cuda")


def products(model: nn.Module, counts: Sequence[int]) -> list[tuple[Product, Tuned]]:
    """Every product for which layers ask, once, with the entry that names these layers."""
    found: dict[tuple[str, Product], Tuned] = {}
    for name, module in model.named_modules():
        for tokens in counts:
            for product in of_layer(module, tokens):
                kind = type(module).__name__
                entry = found.setdefault((kind, product), _entry(kind, product))
                entry.layers.append(name or "(root)")
    return [(product, entry) for (_, product), entry in found.items()]


def of_layer(module: nn.Module, tokens: int) -> tuple[Product, ...]:
    """The products that a layer asks ``choice`` about, under the autocast that is on; none for other modules."""
    if not isinstance(module, (CompressedLinear, NMWeight)):
        return ()
    weight = module.values if isinstance(module, CompressedLinear) else module.weight
    cast = autocast_dtype(weight)
    dtype: torch.dtype = cast if cast is not None and castable(weight.dtype) else weight.dtype
    asked: tuple[Product, ...] = module.products(tokens, dtype)
    return tuple(product for product in asked if product.device.type in DEVICES)


def _entry(kind: str, product: Product) -> Tuned:
    pattern, dtype = f"{product.n}:{product.m}", str(product.dtype).removeprefix("torch.")
    return Tuned([], kind, product.role, (product.rows, product.cols), product.tokens, pattern, dtype)


def tune_one(product: Product, entry: Tuned, timer: Timer | None) -> Path:
    """Measure a product, fill in its entry, and follow what was found from now on.

    Raises:
        OSError: the table cannot be written; this process follows it all the same.
    """
    try:
        found = choice.measure(product, timer=timer)
    except RuntimeError as error:  # out of memory, mostly
        entry.choice = f"not measured: {str(error).splitlines()[0]}"
        return choice.table.path()
    entry.default, entry.best, entry.choice = found.seconds.get(found.baseline), found.seconds.get(found.best), found.best
    entry.refused = [f"{name}: {why}" for name, why in found.refused.items()]
    for why in entry.refused:
        log.warning("%s: refused %s", product.words(), why)
    return choice.record(found)
