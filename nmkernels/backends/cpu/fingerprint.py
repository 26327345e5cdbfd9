"""A fingerprint of what tensors hold, at the speed of reading them: how a copy is known to be still right."""

from __future__ import annotations

import torch
from torch import Tensor

from ...capability import compiled_core
from .core import core

ALONE = 16 << 20
"""Bytes below which one thread reads as fast as several, which have to be woken first."""


def fingerprint(*tensors: Tensor) -> tuple[int, ...] | None:
    """64 bits of each tensor's bytes, equal where those are, and by all likelihood only there; shape, strides and dtype are not in it.

    Version counters do not see writes through ``.data`` or by fused optimizers; this does. None where the compiled core is not built, or
    cannot read a tensor: not on the CPU, of another class, or with gaps in its memory.
    """
    if not compiled_core().ok:
        return None
    found, threads = [], torch.get_num_threads()
    for x in tensors:
        plain = type(x) in (Tensor, torch.nn.Parameter) and x.is_cpu and x.layout == torch.strided
        if not plain or not (x.is_contiguous() or (x.dim() == 2 and x.t().is_contiguous())):
            return None
        found.append(core().fingerprint(x.data_ptr(), x.nbytes, threads if x.nbytes >= ALONE else 1))
    return tuple(found)
