"""Finishing a recipe at the end of another library's training loop."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def finish_or_warn(verb: str) -> Iterator[None]:
    """Turn an error of ``handle.finish()`` in the ``with`` block into a warning; the model then stays as it was trained.

    An exception after the last step would keep the trainer, and the script after it, from saving the trained weights.
    """
    try:
        yield
    except Exception as error:  # out of memory too
        warnings.warn(
            f"{verb}: training is done, but the recipe could not be finished: {error}\n"
            "The model is as it was trained, not pruned. Once the cause is fixed, call handle.finish().",
            stacklevel=3,
        )
