"""Optimizer state that survives load_state_dict as it was saved.

``torch.optim.Optimizer.load_state_dict`` casts every state tensor except ``step`` to the parameter's dtype: fp32 moments of a bf16
parameter would come back rounded. It also keeps the very tensors of the state dict, so that two optimizers loaded from one would
count their steps together.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..pattern import CheckpointError

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def check_adam_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise ``CheckpointError`` unless ``state_dict`` is one of an Adam over parameters of these shapes; nothing is changed.

    Numbers of groups and parameters are left to torch, which compares them by itself.
    """
    if not all("betas" in group and "eps" in group for group in state_dict["param_groups"]):
        raise CheckpointError("MaskedAdamW: the state dict is of another kind of optimizer: its parameter groups have no betas and eps.")
    for saved, p in _pairs(optimizer, state_dict):
        if not saved:
            continue
        missing = [name for name in ("step", *MOMENTS[:2]) if name not in saved]
        if missing:
            raise CheckpointError(f"MaskedAdamW: the state dict is of another kind of optimizer: its state has no {', '.join(missing)}.")
        for name in MOMENTS:
            if name in saved and saved[name].shape != p.shape:
                raise CheckpointError(
                    f"MaskedAdamW: the state dict is of another model: {name} has shape {tuple(saved[name].shape)} "
                    f"for a parameter of shape {tuple(p.shape)}."
                )


def restore_adam_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Copy once more what ``optimizer`` has just loaded, uncast: moments in fp32 for 16-bit parameters, otherwise in their dtype."""
    for saved, p in _pairs(optimizer, state_dict):
        state = optimizer.state[p] if saved else {}
        dtype = torch.float32 if p.dtype.itemsize == 2 else p.dtype
        for name in MOMENTS:
            if name in saved:
                state[name] = torch.empty_like(p, dtype=dtype, memory_format=torch.preserve_format).copy_(saved[name].detach())
        if saved:
            # torch makes a step that was saved as a number a tensor of the default dtype; the kernel counts in fp32
            state["step"] = state["step"].detach().to(torch.float32, copy=True)


def _pairs(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """(saved state, parameter), matched by position as torch does."""
    saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for saved_id, p in zip(saved_ids, params, strict=False):
        yield state_dict["state"].get(saved_id, {}), p
