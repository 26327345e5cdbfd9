"""Every linear-like layer of a model with what a recipe would make of it, shared by what counts and by what predicts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from ..nn import CompressedLinear, NMWeight
from ..pattern import Pattern, RecipeError
from .base import Recipe
from .registry import suggestion
from .report import Entry
from .select import FilterFn, select


def inventory(verb: str, model: nn.Module, recipe: Recipe, filter_fn: FilterFn | None) -> tuple[list[Entry], dict[str, Pattern]]:
    """Every linear-like layer of the model, sparse where it is, or where ``sparsify_`` would make it so; and the patterns of those."""
    done = {name: m for name, m in model.named_modules() if isinstance(m, (NMWeight, CompressedLinear))}
    if done and filter_fn is not None:
        raise RecipeError(f"{verb}: the model is sparse already, so filter_fn has nothing to choose; leave it out.")
    chosen, report = select(model, Pattern(recipe.pattern), filter_fn, recipe.unwise, recipe.obstacle)
    linear = [e for e in report.entries if e.linear]
    if not linear:
        raise RecipeError(f"{verb}: the model has no linear layer to count.")
    if done:
        patterns = {name: m.pattern if isinstance(m, NMWeight) else m.weight.pattern for name, m in done.items()}
    else:
        weights = {c.name: c.module.get_parameter("weight").detach() for c in chosen}
        turned = {c.name for c in chosen if not isinstance(c.module, nn.Linear)}  # Conv1D has its weight as (in, out)
        own = recipe.layer_patterns({name: w.t() if name in turned else w for name, w in weights.items()}) or {}
        patterns = {c.name: own.get(c.name, Pattern(recipe.pattern)) for c in chosen}
    entries = []
    for e in linear:
        pattern = patterns.get(e.name)
        reason = recipe.note(pattern, e.shape[:2]) if pattern else "left dense" if e.sparse else e.reason  # type: ignore[arg-type]
        entries.append(replace(e, sparse=pattern is not None, reason=reason))
    return entries, patterns


def passes(verb: str, entries: list[Entry], given: Mapping[str, float]) -> list[float]:
    """How often a token passes through each layer: what ``given`` says of it or of the nearest module around it, else once."""
    for key, value in given.items():
        if isinstance(value, bool) or not 0 <= value < math.inf:
            raise RecipeError(f"{verb}: rows[{key!r}]={value!r} must be a finite number of at least 0.")
        if not any(_inside(e.name, key) for e in entries):
            names = [e.name for e in entries]
            raise RecipeError(f"{verb}: rows names {key!r}, and no linear layer is called that or lies in it{suggestion(key, names)}.")
    rows = []
    for e in entries:
        keys = [key for key in given if _inside(e.name, key)]
        # how many tokens reach an expert is the router's matter
        rows.append(float(given[max(keys, key=len)]) if keys else 1.0 if len(e.shape) == 2 else 0.0)
    return rows


def _inside(name: str, key: str) -> bool:
    return name == key or name.startswith(f"{key}.")


def skeleton(shapes: Mapping[str, tuple[int, int]]) -> nn.Module:
    """A model without memory that has linear layers of these names and shapes ``(out, in)``."""
    root = nn.Module()
    for name, (rows, cols) in shapes.items():
        *path, last = name.split(".")
        parent = root
        for key in path:
            if key not in parent._modules:
                parent.add_module(key, nn.Module())
            parent = parent.get_submodule(key)
        parent.add_module(last, nn.Linear(cols, rows, bias=False, device="meta"))
    return root
