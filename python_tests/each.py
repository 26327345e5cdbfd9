"""Many values of one idea in one test."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from nmkernels import dispatch


def each(names: str, values: Iterable[Any], **_: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As ``pytest.mark.parametrize``, but one test: it runs for every value from the same seed, and the first that fails is named."""
    given = [name.strip() for name in names.split(",")]
    cases = list(values)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            for case in cases:
                found = dict(zip(given, case if len(given) > 1 else (case,), strict=True))
                torch.manual_seed(0)
                dispatch.forget()
                try:
                    test(*args, **kwargs, **found)
                except Exception as error:
                    raise AssertionError(f"where {', '.join(f'{name}={value!s:.80}' for name, value in found.items())}: {error}") from error

        signature = inspect.signature(test)
        run.__signature__ = signature.replace(parameters=[p for p in signature.parameters.values() if p.name not in given])  # type: ignore[attr-defined]
        return run

    return decorate
