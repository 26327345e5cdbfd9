"""Recipes inside other recipes (the second phase of STEP, LayerWise), and the settings that a resumed run must share."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..pattern import CheckpointError, NMError, Pattern, RecipeError
from .contract import Recipe, Span, Stage, State
from .registry import get, parse, spec

ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
"""A parameter group for ``Recipe.first_state`` where there is no optimizer yet."""


@dataclass(frozen=True)
class Composite(Recipe):
    """A recipe that delegates to another one, ``inner``, which as text need not repeat pattern and total_steps."""

    inner: Recipe | str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner is None:
            return
        kind, inner, total = type(self).__name__, self.inner, self.total_steps
        if isinstance(inner, str):
            _, pattern, options = parse(inner)
            config = {} if pattern is not None or "pattern" in options else {"pattern": self.pattern}
            if total is not None and "total_steps" not in options:
                config["total_steps"] = total
            inner = get(inner, **config)
        if not isinstance(inner, Recipe):
            raise RecipeError(f"{kind}: inner={inner!r} must be a recipe, or its name such as 'srste' or 'mdgf(end=0.8)'.")
        if inner.pattern != self.pattern:
            raise RecipeError(
                f"{kind}: the inner recipe {type(inner).__name__} is {inner.pattern} and {kind} itself {self.pattern}; give both the same "
                f'pattern, as in {kind}("{inner.pattern}", inner={type(inner).__name__}("{inner.pattern}", ...)).'
            )
        object.__setattr__(self, "inner", inner if total is None else of_length(inner, total))
        object.__setattr__(self, "final", inner.final)

    def active(self, state: State) -> tuple[Recipe, State]:
        """The recipe in charge in ``state``, and its own state; both states are empty before an optimizer is attached."""
        assert isinstance(self.inner, Recipe)
        return self.inner, state


def _delegate(name: str, member: Any) -> Any:
    if isinstance(member, property):
        return property(lambda self: getattr(self.active({})[0], name), doc=member.__doc__)

    of_state = "state" in inspect.signature(member).parameters

    @functools.wraps(member)
    def delegated(self: Composite, *args: Any, **kwargs: Any) -> Any:
        inner, state = self.active(args[0] if of_state else {})
        return getattr(inner, name)(*([state, *args[1:]] if of_state else args), **kwargs)

    return delegated


for _name, _member in vars(Recipe).items():
    if (callable(_member) or isinstance(_member, property)) and not _name.startswith("_"):
        setattr(Composite, _name, _delegate(_name, _member))


@functools.lru_cache(maxsize=256)
def of_length(recipe: Recipe, total_steps: int) -> Recipe:
    """``recipe`` over ``total_steps`` steps."""
    return recipe if recipe.total_steps == total_steps else replace(recipe, total_steps=total_steps)


def with_pattern(recipe: Recipe, pattern: Pattern) -> Recipe:
    """``recipe`` and its inner recipes with another pattern, to count the FLOPs of layers that have one of their own."""
    inner = getattr(recipe, "inner", None)
    changes: dict[str, Any] = {"inner": with_pattern(inner, pattern)} if isinstance(inner, Recipe) else {}
    return replace(recipe, pattern=pattern, **changes)


def innermost(recipe: Recipe) -> Recipe:
    """The recipe of the sparse steps."""
    while isinstance(recipe, Composite):
        recipe = recipe.active({})[0]
    return recipe


def deployed(recipe: Recipe) -> Span:
    """The FLOPs of one forward pass after ``finish``: N/M, or dense where ``final`` is, plus an adapter where one stays."""
    inner, share = innermost(recipe), 1.0 if recipe.final == "dense" else Pattern(recipe.pattern).density
    rank = inner.profile(inner.total_steps or 1)[-1].rank if recipe.final == "nm+adapter" else 0
    return Span(1, fprop=share, dgrad=0.0, wgrad=0.0, rank=rank)


def first_stage(recipe: Recipe) -> Stage:
    """The stage in which ``recipe`` would begin under an ordinary AdamW."""
    return recipe.stage(recipe.first_state(ADAMW))


def check_state(recipe: Recipe, state: Any, group: dict[str, Any]) -> None:
    """Raise ``CheckpointError`` unless a run of ``recipe`` can resume from ``state``, which a checkpoint holds.

    Pattern and recipe must be the same, and the settings that say so; likewise those of an inner recipe that has begun.
    """
    theirs = state.get("spec") if isinstance(state, dict) else None
    mine = spec(recipe)
    if not isinstance(theirs, dict) or "recipe" not in theirs:
        raise CheckpointError("the optimizer state holds a recipe state that nmkernels did not write.")
    if any(theirs.get(key) != mine[key] for key in ("recipe", "pattern")):
        raise CheckpointError(
            f"the checkpoint is of {theirs['recipe']}:{theirs.get('pattern')}, this run uses {mine['recipe']}:{mine['pattern']}. "
            "Resume with the same recipe, or load only the model's weights."
        )
    missing = sorted(set(recipe.first_state(group)) - set(state) - set(recipe._optional_state))
    if missing:
        raise CheckpointError(f"the checkpoint's recipe state is incomplete or comes from another version: it has no {', '.join(missing)}.")
    kinds = {f.name: f.metadata.get("resume") or recipe._resume for f in fields(recipe)}
    same = [name for name, kind in kinds.items() if kind == "same" or (kind == "until inner" and "inner" not in state)]
    then = {name: recipe._renamed.get(str(theirs.get(name)), theirs.get(name)) for name in same}
    changed = [f"{key} is {value} there and {mine[key]} here" for key, value in then.items() if value != mine[key]]
    if changed:
        way_out, steps = "Resume with the same settings", then.get("total_steps")
        if steps is not None and steps != recipe.total_steps:  # a trainer may have set it
            way_out += f"; to train for more steps than max_steps or epochs gave, set total_steps={steps} in the recipe"
        raise CheckpointError(f"the checkpoint was written under another schedule: {'; '.join(changed)}. {way_out}.")
    if isinstance(recipe, Composite):
        inner, inner_state = recipe.active(state)
        if inner_state is state:
            try:
                inner_state = {**state, "spec": spec(get(str(theirs.get("inner"))))}
            except (TypeError, NMError) as error:
                raise CheckpointError(f"the checkpoint's inner recipe comes from another version of nmkernels: {error}") from error
        if inner_state:
            check_state(inner, inner_state, group)
