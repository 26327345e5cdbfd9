"""metadata: canonical 2:4 indices in the order in which tensor cores read them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.layouts import LAYOUTS, meta_shape
from ._core import core, queue, register


@register("nm_metadata")
def metadata(indices: Tensor, cols: int, layout: str, out: Tensor | None = None) -> Tensor:
    """``nm_metadata``. One read of the indices, for which no address is too odd."""
    rows, indices = indices.shape[0], indices.contiguous()
    meta = indices.new_empty(meta_shape(rows, cols, layout), dtype=torch.int32) if out is None else out
    core(indices).metadata(indices.data_ptr(), rows, cols, LAYOUTS.index(layout), meta.data_ptr(), *queue(indices))
    return meta
