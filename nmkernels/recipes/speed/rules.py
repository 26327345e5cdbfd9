"""What a recipe, or a layer that is sparse already, does in a sparse step: the rules that its costs follow from."""

from __future__ import annotations

from dataclasses import replace

from ...autograd import SoftThreshold, TransposableMask, WeightTransform
from ...nn import NMWeight
from ...pattern import Pattern
from ..base import Recipe
from ..cost import Span
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
    return Rules(pattern, best.fprop < 1, best.dgrad < 1, estimate, kind, best.wgrad > 0, sparse, leaves)


def of_layer(layer: NMWeight) -> Rules:
    """The rules by which a sparse layer is trained now; in a dense phase, those of what ``finish`` will apply."""
    transform, plan = layer.transform or layer.final, layer.plan
    columns = isinstance(transform, TransposableMask) or not transform.symmetric
    estimate = Pattern(plan.n, plan.m) if plan.wgrad in ("mvue", "magnitude") else None
    return Rules(layer.pattern, True, columns, estimate, _prepare(transform, columns), plan.wgrad != "none")


def frozen(rules: Rules) -> Rules:
    """The same for a weight without a gradient."""
    return replace(rules, trains=False, estimate=None)


def _work(span: Span) -> float:
    return span.fprop + span.dgrad + span.wgrad


def _prepare(transform: WeightTransform, columns: bool) -> str:
    # a doubly pruned weight costs what a transposable one does: two packed forms
    return "threshold" if isinstance(transform, SoftThreshold) else "transposable" if columns else "mask"


def _estimate(recipe: Recipe) -> Pattern:
    inner = getattr(recipe, "inner", None)
    return Pattern(getattr(recipe, "mvue_pattern", getattr(inner, "mvue_pattern", "2:4")))
