"""What a recipe, or a layer that is sparse already, does in a sparse step: the rules that its costs follow from."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from ...autograd import SoftThreshold, TransposableMask, WeightTransform
from ...nn import NMWeight
from ...pattern import Pattern, RecipeError
from ..base import Recipe
from ..cost import Span
from ..inner import Outer
from ..registry import find, get
from ..text import parse
from .costs import Rules

STEPS = 10_000
"""Steps of the run whose sparse steps are looked for, for recipes that do not say how long they are."""


def of_recipe(recipe: Recipe, pattern: Pattern) -> Rules:
    """The rules of the cheapest steps of ``recipe`` for a layer of ``pattern``, and the share of its run's steps that are sparse."""
    steps = recipe.total_steps or STEPS
    own = recipe if pattern == recipe.pattern else recipe.of_pattern(pattern)
    spans = [span for span in own.profile(steps) if span.steps]
    best = min(spans, key=_work)
    sparse = sum(span.steps for span in spans if _work(span) < 3) / steps
    if _work(best) == 3:
        return Rules(pattern, fprop=False, prepare="", steps=0.0, leaves=own.deployed().fprop < 1)
    transform = own.final_transform()
    estimate = _estimate(recipe) if 0 < best.wgrad < 1 else None
    kind, leaves = _prepare(transform, best.dgrad < 1), own.deployed().fprop < 1
    packed = bool(getattr(inner_of(recipe), "packed", False))
    return Rules(pattern, best.fprop < 1, best.dgrad < 1, estimate, kind, best.wgrad > 0, sparse, leaves, packed)


def of_layer(layer: NMWeight) -> Rules:
    """The rules by which a sparse layer is trained now; in a dense phase, those of what ``finish`` will apply."""
    transform, plan = layer.transform or layer.final, layer.plan
    columns = isinstance(transform, TransposableMask) or not transform.symmetric
    estimate = Pattern(plan.n, plan.m) if plan.wgrad in ("mvue", "magnitude") else None
    return Rules(layer.pattern, True, columns, estimate, _prepare(transform, columns), plan.wgrad != "none", packed=plan.packs)


def frozen(rules: Rules) -> Rules:
    """The same for a weight without a gradient."""
    return replace(rules, trains=False, estimate=None)


def _work(span: Span) -> float:
    return span.fprop + span.dgrad + span.wgrad


def _prepare(transform: WeightTransform, columns: bool) -> str:
    # a doubly pruned weight costs what a transposable one does: two packed forms
    return "threshold" if isinstance(transform, SoftThreshold) else "transposable" if columns else "mask"


def _estimate(recipe: Recipe) -> Pattern:
    return Pattern(getattr(inner_of(recipe), "mvue_pattern", "2:4"))


def inner_of(recipe: Recipe) -> Recipe:
    """The recipe that says what a sparse step does: the inner one of STEP and LayerWise."""
    return recipe.inner_at({})[0] if isinstance(recipe, Outer) else recipe


def by_name(spec: str) -> Recipe:
    """The recipe of a text, with ``packed="auto"`` and as long as a schedule needs to be seen, unless the text says otherwise."""
    name, _, given = parse(spec)
    free = {f.name for f in fields(find(name)) if f.init} - set(given)
    auto: dict[str, Any] = {"packed": "auto"} if "packed" in free and "inner" not in given else {}
    try:
        long = get(spec, total_steps=STEPS, **auto) if "total_steps" in free else get(spec, **auto)
    except RecipeError:  # emulated FP8 needs the dense layout, for instance
        auto = {}
        long = get(spec, total_steps=STEPS) if "total_steps" in free else get(spec)
    try:
        short = get(spec, **auto)
    except RecipeError:
        return long
    return short if short.profile(STEPS) == long.profile(STEPS) else long
