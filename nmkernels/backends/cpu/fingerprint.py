"""A fingerprint of tensors' contents at memory speed, to detect that a cached copy is out of date."""

from __future__ import annotations

import torch
from torch import Tensor

from ...capability import compiled_core
from .core import core


def fingerprint(*tensors: Tensor) -> tuple[int, ...] | None:
    """A 64-bit hash of each tensor's bytes, without shape, strides and dtype.

    Unlike version counters it detects writes through ``.data`` and by fused optimizers. None if the compiled core is not built or cannot
    read a tensor: not on the CPU, a subclass, or with gaps in its memory.
    """
    if not compiled_core().ok:
        return None
    hashes, threads = [], torch.get_num_threads()
    for x in tensors:
        plain = type(x) in (Tensor, torch.nn.Parameter) and x.is_cpu and x.layout == torch.strided
        if not plain or not (x.is_contiguous() or (x.dim() == 2 and x.t().is_contiguous())):
            return None
        # up to 16 MB one thread reads as fast as several, which must be woken first
        hashes.append(core().fingerprint(x.data_ptr(), x.nbytes, threads if x.nbytes >= 16 << 20 else 1))
    return tuple(hashes)
