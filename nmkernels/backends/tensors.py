"""What backends ask of tensors before they take their addresses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

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
