"""The option ``packed`` of recipes: whether products multiply the compressed weight, and which ones."""

from __future__ import annotations

from dataclasses import replace

from ..autograd import STRAIGHT_THROUGH, GemmPlan
from ..pattern import Pattern, PatternLike, RecipeError

PACKED = (False, True, "auto")
"""Nowhere; in fprop, and in dgrad where the packed weight serves it; at every call where it was measured to be faster."""


def packing(recipe: str, packed: bool | str, pattern: PatternLike, plan: GemmPlan = STRAIGHT_THROUGH) -> GemmPlan:
    """``plan``, a dense one, with the products of the weight by ``packed``.

    Args:
        pattern: of the weights; the estimate of ``plan`` keeps its own.

    Raises:
        RecipeError: ``packed`` is none of ``PACKED``. NMError: the plan has something that needs the dense layout.

    Example:
        >>> plan = packing("STE", True, "2:4")
        >>> plan.fprop, plan.dgrad
        ('packed', 'device')
    """
    if packed not in PACKED:
        raise RecipeError(f'{recipe}: packed={packed!r} is unknown; choose one of False, True and "auto".')
    if not packed:
        return plan
    p = Pattern(pattern)
    n, m = (plan.n, plan.m) if plan.m else (p.n, p.m)
    rules = ("auto", "auto") if packed == "auto" else ("packed", "device")
    return replace(plan, fprop=rules[0], dgrad=rules[1], n=n, m=m)
