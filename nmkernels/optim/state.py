"""Optimizer state that survives load_state_dict as it was saved.

``torch.optim.Optimizer.load_state_dict`` casts every state tensor except ``step`` to the parameter's dtype: fp32 moments of a bf16
parameter would come back rounded.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch


def keep_moments_in_fp32(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], names: tuple[str, ...]) -> None:
    """Put the moments of ``state_dict`` back uncast: fp32 for 16-bit parameters, otherwise the parameter's dtype.

    Args:
        optimizer: one that has just loaded ``state_dict``.
        names: the state entries to restore.
    """
    saved_ids = chain.from_iterable(g["params"] for g in state_dict["param_groups"])
    params = chain.from_iterable(g["params"] for g in optimizer.param_groups)
    for saved_id, p in zip(saved_ids, params, strict=True):
        saved = state_dict["state"].get(saved_id, {})
        dtype = torch.float32 if p.dtype.itemsize == 2 else p.dtype
        for name in names:
            if isinstance(saved.get(name), torch.Tensor):
                loaded = torch.empty_like(p, dtype=dtype, memory_format=torch.preserve_format)
                optimizer.state[p][name] = loaded.copy_(saved[name].detach())
