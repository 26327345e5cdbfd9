"""Fill new memory with NaN, to detect outputs that a kernel leaves unwritten."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor

_MAKERS = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty"), (Tensor, "new_empty_strided"))


@contextmanager
def poison() -> Iterator[None]:
    """Fill every ``torch.empty``, ``empty_like``, ``empty_strided`` and ``new_empty`` called inside with 0xFF bytes.

    That is NaN in every floating-point dtype, -1 or 255 in integers. Only calls by these names are affected: not torch's internal ones, nor
    functions bound to another name before.

    Example:
        >>> with poison():
        ...     x = torch.empty(2)
        >>> x.isnan().all().item()
        True
    """

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return functools.wraps(make)(lambda *args, **kwargs: fill_poison(make(*args, **kwargs)))

    with ExitStack() as stack:
        for owner, name in _MAKERS:
            stack.enter_context(mock.patch.object(owner, name, poisoned(getattr(owner, name))))
        yield


def fill_poison(x: Tensor) -> Tensor:
    """Overwrite the whole storage of ``x`` with 0xFF bytes; tensors without their own memory are left alone."""
    if type(x) in (Tensor, torch.nn.Parameter) and x.device.type != "meta":
        x.untyped_storage().fill_(0xFF)  # type: ignore[attr-defined]
    return x
