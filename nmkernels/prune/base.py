"""What a one-shot pruning method is: a function from a weight and the Hessian of its inputs to a mask and new weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar

from torch import Tensor

from .. import ops
from ..arguments import finite_number, whole_number
from ..pattern import Pattern, PatternLike, RecipeError
from ..recipes.registry import parse, suggestion

METHODS: dict[str, type[OneShot]] = {}
"""All methods by name."""
FORM = "a one-shot method: write it as name, or name(keyword=value, ...), for instance admm(refit=0)"


@dataclass(frozen=True)
class OneShot:
    """A one-shot pruning method. A new one is a subclass with ``solve``; its name is that of its class, in lower case.

    Args:
        damping: added to the Hessian that ``solve`` gets, as a share of its mean diagonal; None: 0.1 below 4 tokens per input, else 0.01.
            Raised tenfold where a factorisation fails.
        refit: steps of conjugate gradients that fit the kept weights after ``solve``, with that damping, or that of None if it is 0.
        transposable: masks that are N:M for W and Wᵀ, so that recipes with a sparse dgrad can train on from them.

    Attributes:
        guarded: whether inputs decide: a result with a larger error than Wanda's mask is replaced by that mask, and few tokens are
            warned of.
        gemms: how many GEMMs of the weight with H a solution costs, about; for the time left until some were timed.
    """

    guarded: ClassVar[bool] = True
    gemms: ClassVar[float] = 3

    damping: float | None = 0.0
    refit: int = 0
    transposable: bool = False

    def __init_subclass__(cls) -> None:
        METHODS[cls.__name__.lower()] = cls

    def __post_init__(self) -> None:
        if self.damping is not None:
            self._set("damping", finite_number)
        self._set("refit", whole_number, least=0)
        if not isinstance(self.transposable, bool):
            raise RecipeError(f"{type(self).__name__}: transposable must be True or False; got {self.transposable!r}.")

    def _set(self, name: str, check: Callable[..., float], **limits: float) -> None:
        """Check a setting, and keep it as a plain number."""
        what = f"{type(self).__name__}: {name}"
        object.__setattr__(self, name, check(RecipeError, what, getattr(self, name), **limits))

    def solve(self, w: Tensor, h: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
        """(new weights, their mask), both ``(out, in)``, for weights ``w`` ``(out, in)`` and H = XᵀX / tokens ``(in, in)``, which is
        damped and positive definite unless ``damping`` is 0. Both are fp32, or fp64 for fp64 weights, and may be overwritten.
        """
        raise NotImplementedError(f"{type(self).__name__} has no solve(w, h, pattern).")

    @property
    def mask(self) -> Callable[[Tensor, PatternLike], Tensor]:
        """``mask(scores, pattern)``: the mask that keeps the largest |scores| of each group, transposable if the method is."""
        return ops.transposable_mask if self.transposable else ops.mask


def resolve(method: OneShot | str) -> OneShot:
    """A method, itself or by name, ``"admm"`` or ``"admm(refit=0)"``.

    Raises:
        RecipeError: no method has that name.
        TypeError: an unknown keyword.
    """
    if isinstance(method, OneShot):
        return method
    if not isinstance(method, str):
        raise RecipeError(f"prune_: method must be a name or a OneShot such as ADMM(); got {type(method).__name__}.")
    name, pattern, options = parse(method, FORM)
    if pattern is not None or name.lower() not in METHODS:
        near = suggestion(name.lower(), METHODS) or "."
        raise RecipeError(f"prune_: no one-shot method is called {method!r}{near} Methods are {', '.join(sorted(METHODS))}.")
    cls = METHODS[name.lower()]
    keywords = [f.name for f in fields(cls)]
    for key in options:
        if key not in keywords:
            raise TypeError(f"the method {name} has no keyword {key!r}{suggestion(key, keywords) or '.'} It takes {', '.join(keywords)}.")
    return cls(**options)


def text(method: OneShot) -> str:
    """A method as one line that ``resolve`` reads, without the settings at their defaults."""
    options = ", ".join(f"{f.name}={value!r}" for f in fields(method) if (value := getattr(method, f.name)) != f.default)
    return type(method).__name__.lower() + (f"({options})" if options else "")
