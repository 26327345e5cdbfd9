"""The linear layers of a model, equal ones together, with what their costs follow from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from ...nn import CompressedLinear, NMWeight, adapter_of
from ...pattern import Pattern
from ..base import Recipe
from ..cost import rank_for
from ..inventory import inventory, passes
from ..report import Entry, starred
from ..select import DTYPES, FilterFn
from .costs import Rules
from .roofline import Layer
from .rules import frozen, of_layer, of_recipe


@dataclass(frozen=True)
class Part:
    """Equal layers: what the report says of them, and what their costs follow from.

    Args:
        rules: None where they stay dense. pattern: theirs, or what they would have.
        trains: there are training steps. learns: in which the weight has a gradient.
        kept: a dense weight is at hand in inference.
    """

    entries: tuple[Entry, ...]
    layer: Layer
    rules: Rules | None
    pattern: Pattern
    trains: bool
    learns: bool
    kept: bool


def parts_of(
    model: nn.Module,
    recipe: Recipe | None,
    report: list[Entry],
    filter_fn: FilterFn | None,
    tokens: int,
    rows: Mapping[str, float],
    dtype: torch.dtype | None,
) -> list[Part]:
    """Equal layers together, in the model's order."""
    modules = dict(model.named_modules())
    done = [m for m in modules.values() if isinstance(m, (NMWeight, CompressedLinear))]
    usual = Counter(m.pattern for m in done).most_common(1)[0][0] if done else None
    entries, patterns = inventory("audit", model, recipe or Recipe(usual or "2:4"), filter_fn)
    said = {e.name: e.reason for e in report if not e.sparse}
    entries = [e if e.sparse or e.name not in said else replace(e, reason=said[e.name]) for e in entries]
    standard = Pattern(recipe.pattern) if recipe is not None else usual or Pattern("2:4")
    found: dict[object, list[Entry]] = {}
    made: dict[object, Part] = {}
    for entry, often in zip(entries, passes("audit", entries, rows), strict=True):
        module = modules.get(entry.name)
        weight, learns = _weight(model, module, entry.name)
        layer = Layer((entry.shape[-2:] or (0, 0)), round(tokens * often), dtype or _usual(weight), _usual(weight))  # type: ignore[arg-type]
        pattern = patterns.get(entry.name)
        rules = None if pattern is None else _rules(module, recipe, pattern, layer.shape)
        rules = rules if rules is None or learns else frozen(rules)
        trains = not isinstance(module, CompressedLinear) and not getattr(module, "finished", False)
        kept = not isinstance(module, CompressedLinear) or module.keep_dense
        part = Part((), layer, rules, pattern or standard, trains and not _deployed(done), learns, kept)
        key = (starred(entry.name), entry.kind, entry.shape, entry.reason, part)
        found.setdefault(key, []).append(entry)
        made[key] = part
    return [replace(part, entries=tuple(found[key])) for key, part in made.items()]


def _deployed(done: list[NMWeight | CompressedLinear]) -> bool:
    """Whether the model is compressed: its dense layers are then not trained either."""
    return bool(done) and all(isinstance(m, CompressedLinear) for m in done)


def _rules(module: nn.Module | None, recipe: Recipe | None, pattern: Pattern, shape: tuple[int, int]) -> Rules:
    if recipe is not None:
        return replace(of_recipe(recipe, pattern), rank=rank_for(recipe.deployed().rank, shape))
    adapter = adapter_of(module) if isinstance(module, (NMWeight, CompressedLinear)) else None
    rules = of_layer(module) if isinstance(module, NMWeight) else Rules(pattern)
    return rules if adapter is None else replace(rules, rank=int(adapter[0].shape[1]))


def _weight(model: nn.Module, module: nn.Module | None, name: str) -> tuple[torch.dtype, bool]:
    """The dtype of a layer's weight, and whether it has a gradient."""
    if isinstance(module, CompressedLinear):
        return module.values.dtype, False
    try:
        weight = model.get_parameter(f"{name}.weight" if module is not None and name else "weight" if module is not None else name)
    except AttributeError:  # computed from other tensors
        return torch.get_default_dtype(), True
    return weight.dtype, weight.requires_grad


def _usual(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in DTYPES else torch.bfloat16
