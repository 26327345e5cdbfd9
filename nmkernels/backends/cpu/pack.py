"""nm_pack, made of the compiled parts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._pack import Parts, pack
from ._core import register
from .groups import compress, mask, soft_threshold, transposable_mask

PARTS = Parts(mask, soft_threshold, transposable_mask, compress)


@register("nm_pack")
def nm_pack(*args: Any, out: None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``nm_pack``, made of the kernels of its parts."""
    return pack(PARTS, *args)
