"""Ranks of ``torch.distributed`` that prune one model together, each on its share of the data. A single process is one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ..pattern import CheckpointError, RecipeError

T = TypeVar("T")


def ranks() -> tuple[int, int]:
    """(how many ranks, this one)."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size(), torch.distributed.get_rank()
    return 1, 0


def gathered(value: T) -> list[T]:
    """``value`` of every rank."""
    count = ranks()[0]
    if count == 1:
        return [value]
    values: list[Any] = [None] * count
    torch.distributed.all_gather_object(values, value)
    return values


@contextmanager
def together() -> Iterator[None]:
    """An error inside is raised on every rank, where the others would wait for this one forever. Nothing inside may communicate."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    problems = gathered(None if error is None else (isinstance(error, CheckpointError), f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise (CheckpointError if problem[0] else RecipeError)(f"prune_: rank {rank} has failed with {problem[1]}")


def agree(what: str, value: object) -> None:
    """Raise on every rank if ``value`` is not the same on all."""
    values = gathered(value)
    different = [rank for rank, other in enumerate(values) if other != values[0]]
    if different:
        raise RecipeError(f"prune_: ranks 0 and {different[0]} have different {what}; all must prune the same model in the same way.")


def by_first(make: Callable[..., T], *args: Any) -> T:
    """What ``make(*args)`` returns or raises on the first rank, which alone calls it."""
    count, rank = ranks()
    outcome: list[Any] = [None]
    with together():
        if rank == 0:
            outcome = [make(*args)]
    if count > 1:
        torch.distributed.broadcast_object_list(outcome)
    value: T = outcome[0]
    return value
