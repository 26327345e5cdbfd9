"""The reference as a backend: it runs everything, and is asked last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import reference
from ..dispatch import REFERENCE, impl

OPS = {f"nm_{fn.__name__}": fn for fn in (
    reference.mask, reference.prune, reference.transposable_mask, reference.compress, reference.decompress, reference.pack,
    reference.linear, reference.linear_dgrad, reference.linear_wgrad, reference.soft_threshold, reference.soft_threshold_scale,
    reference.mvue, reference.mvue_compress, reference.masked_adamw_, reference.masked_adamw_pack_, reference.pack_forms_,
    reference.quantize, reference.quantize_pack, reference.linear_quantized, reference.quantize_values, reference.dequantize_values,
    reference.linear_integers,
)} | {"nm_metadata": reference.to_layout}  # fmt: skip


def _register(op: str, fn: Callable[..., Any]) -> None:
    """Register a floor-1 function; its result is made contiguous, or copied into ``out``; None where it only writes into arguments."""

    def run(*args: Any, out: Any = None) -> Any:
        result = fn(*args)
        if result is None:
            return None
        one = isinstance(result, Tensor)
        if out is None:
            return result.contiguous() if one else tuple(r.contiguous() for r in result)
        for target, source in zip((out,) if one else out, (result,) if one else result, strict=True):
            target.copy_(source)
        return out

    impl(op, backend=REFERENCE, priority=0)(run)


for _op, _fn in OPS.items():
    _register(_op, _fn)
