"""The end of a training loop that is somebody else's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def keeping_the_run(verb: str) -> Iterator[None]:
    """Turn an exception of ``handle.finish()`` inside into a warning, with which the model stays as it was trained.

    After the last step there is nothing to save the weights but what the trainer, and the script behind it, do next.
    """
    try:
        yield
    except Exception as error:  # out of memory too
        warnings.warn(
            f"{verb}: training is over, but its recipe could not be finished: {error}\n"
            "The model is as it was trained, not pruned. Once the cause is mended, handle.finish() finishes it.",
            stacklevel=3,
        )
