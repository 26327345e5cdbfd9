"""nm_pack, made of the compiled parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._dispatch import Verdict
from .._pack import Parts, pack
from ._core import register, supports
from .groups import compress, mask, soft_threshold, transposable_mask

PARTS = Parts(mask, soft_threshold, transposable_mask, compress)


def supports_pack(*args: Any) -> Verdict:
    """What nm_pack can run: what its parts can."""
    return supports(*args) if args[6] != torch.float64 else (False, "it computes in float32, and float64 values are asked for")


@register("nm_pack", supports_pack)
def _pack(*args: Any, out: None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return pack(PARTS, *args)
