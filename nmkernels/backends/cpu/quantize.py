"""``nm_quantize_pack`` by the core's ``compress``: only the kept values are scaled and rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.layouts import EIGHT_BIT, to_layout
from ...reference.quantize import rounded
from .core import register
from .groups import compress


@register("nm_quantize_pack")
def quantize_pack(w: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values, indices = compress(w, 2, 4)
    return rounded(values.float() * scale.reshape(-1, 1), dtype), to_layout(indices, w.shape[1], EIGHT_BIT)
