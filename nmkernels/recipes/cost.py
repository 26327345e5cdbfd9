"""What a recipe costs in FLOPs: consecutive spans of a run with the share of the dense work that each product does."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..pattern import RecipeError


@dataclass(frozen=True)
class Span:
    """``steps`` consecutive optimizer steps and what the three products of a sparse layer cost in them, as shares of the dense ones.

    A product counts as cheaper where N:M structure lies along the dimension that it sums over, which is what sparse tensor cores and
    packed kernels need: for fprop y = x W̃ᵀ groups of the weight along ``in``, for dgrad ∂L/∂x = g W̃ along ``out``, for wgrad gᵀ x
    groups of gᵀ along tokens. A mask by rows alone therefore leaves dgrad dense, and zeros without structure count as numbers.

    Args:
        steps: optimizer steps, at least 0.
        fprop: N/M where the forward weight is N:M along ``in``; 1 while it is dense or only fading.
        dgrad: N/M where the weight used in dgrad is N:M along ``out`` (transposable, double-pruned, or with a mask of its own); else 1.
        wgrad: N/M of the output gradient's estimate along tokens (1/2 for MVUE 2:4); 0 where no weight gradient is computed; else 1.
        rank: of a dense low-rank adapter beside the weight, which adds 2·rank·(in + out) to each product; 0 for none. A number, or a share
            below 1 of the layer's smaller side, see ``rank_for``.
        teacher: dense forward passes of the whole model beside each training step, for distillation.

    Raises:
        RecipeError: a value is negative or not finite.

    Example:
        >>> Span(100, fprop=0.5, wgrad=0.5)
        Span(steps=100, fprop=0.5, dgrad=1.0, wgrad=0.5, rank=0, teacher=0)
    """

    steps: int
    fprop: float = 1.0
    dgrad: float = 1.0
    wgrad: float = 1.0
    rank: float | int = 0
    teacher: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not 0 <= value < math.inf:
                raise RecipeError(f"Span: {name}={value!r} must be a finite number of at least 0.")


def rank_for(rank: float | int, shape: tuple[int, ...]) -> int:
    """The rank of an adapter beside a weight of ``shape``: ``rank`` if whole, else that share of the smaller side, at least 1; 0 for none.

    Example:
        >>> rank_for(4, (256, 64)), rank_for(0.1, (256, 64)), rank_for(0.001, (256, 64)), rank_for(0.0, (256, 64))
        (4, 6, 1, 0)
    """
    if isinstance(rank, int) or rank == 0:
        return int(rank)
    return max(1, round(rank * min(shape[-2:])))


def first(steps: int, spans: Iterable[Span]) -> list[Span]:
    """The first ``steps`` steps of consecutive ``spans``: what comes later is cut off, and the last span goes on if they are too short.

    Example:
        >>> [(span.steps, span.fprop) for span in first(100, [Span(30), Span(0), Span(50, fprop=0.5)])]
        [(30, 1.0), (70, 0.5)]
    """
    *most, last = spans
    taken, left = [], steps
    for span in (*most, replace(last, steps=steps)):
        here = min(span.steps, left)
        if here:
            taken.append(replace(span, steps=here))
        left -= here
    return taken
