"""The reference as a backend: it runs everything, and is asked last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import reference
from ..dispatch import REFERENCE, impl


def _register(op: str, fn: Callable[..., Any]) -> None:
    """Register a floor-1 function; its result is made contiguous, or copied into ``out``."""

    def run(*args: Any, out: Any = None) -> Any:
        result = fn(*args)
        if out is not None:
            for target, source in zip(_tuple(out), _tuple(result), strict=True):
                target.copy_(source)
            return out
        return result.contiguous() if isinstance(result, Tensor) else tuple(r.contiguous() for r in result)

    impl(op, backend=REFERENCE, priority=0)(run)


def _tuple(x: Any) -> tuple[Tensor, ...]:
    return (x,) if isinstance(x, Tensor) else tuple(x)


_register("nm_mask", reference.mask)
_register("nm_prune", reference.prune)
_register("nm_transposable_mask", reference.transposable_mask)
_register("nm_compress", reference.compress)
_register("nm_decompress", reference.decompress)
_register("nm_pack", reference.pack)
_register("nm_metadata", reference.to_layout)
_register("nm_linear", reference.linear)
_register("nm_linear_dgrad", reference.linear_dgrad)
_register("nm_linear_wgrad", reference.linear_wgrad)
_register("nm_soft_threshold", reference.soft_threshold)
_register("nm_soft_threshold_scale", reference.soft_threshold_scale)
_register("nm_mvue", reference.mvue)
_register("nm_mvue_compress", reference.mvue_compress)
_register("nm_masked_adamw_", reference.masked_adamw_)
