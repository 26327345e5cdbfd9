"""What backends ask of tensors before they take their addresses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

ORDERED = False, "it reads canonical indices, and these are metadata in the order of a tensor core"
"""What a backend answers that knows no device layout."""


def tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    """Every tensor among arguments and lists of them."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from tensors(arg)


class Around(NamedTuple):
    """A contiguous tensor around its grouped dimension, as ``(outer, length, inner)``."""

    g: Tensor
    outer: int
    length: int
    inner: int


def around(g: Tensor, dim: int, turn: bool = False) -> Around:
    """``g`` around ``dim``; with ``turn`` a matrix may be taken as its transpose, of which the packed rows are the same."""
    dim %= g.dim()
    if turn and g.dim() == 2 and not g.is_contiguous() and g.t().is_contiguous():
        g, dim = g.t(), 1 - dim
    g, shape = (g.resolve_neg() if g.is_neg() else g).contiguous(), g.shape
    return Around(g, shape[:dim].numel(), shape[dim], shape[dim + 1 :].numel())


def row_stride(x: Tensor) -> int | None:
    """The one stride between rows of ``x`` seen as ``(rows, last dimension)``; None where no single stride exists."""
    step, reach = 0, None
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if reach is None:
            step = stride
        elif stride != reach:
            return None
        reach = stride * size
    return step
