"""``for_each``: many values in one test."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from nmkernels import dispatch


def for_each(names: str, values: Iterable[Any], **_: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like ``pytest.mark.parametrize``, but as one test: every value starts from the same seed; the error names the first that fails."""
    parameters = [name.strip() for name in names.split(",")]
    cases = list(values)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            for case in cases:
                keywords = dict(zip(parameters, case if len(parameters) > 1 else (case,), strict=True))
                torch.manual_seed(0)
                dispatch.forget()
                try:
                    test(*args, **kwargs, **keywords)
                except Exception as error:
                    raise AssertionError(
                        f"where {', '.join(f'{name}={value!s:.80}' for name, value in keywords.items())}: {error}"
                    ) from error

        signature = inspect.signature(test)
        left = [p for p in signature.parameters.values() if p.name not in parameters]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorate
