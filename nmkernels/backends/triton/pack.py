"""nm_pack, made of the kernels of its parts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import pack as _pack
from .compress import compress
from .groups import mask, soft_threshold
from .transposable import transposable_mask

PARTS = _pack.Parts(mask, soft_threshold, transposable_mask, compress)


def pack(*args: Any, out: None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``nm_pack``. A mask, also one that it makes itself, is checked by ``compress``, for which the host waits."""
    return _pack.pack(PARTS, *args)
