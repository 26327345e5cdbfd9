"""What autocast would do with a linear layer's operands; an autograd Function has to do it by itself."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of products under the autocast that is on for x's device, or None."""
    if x.is_cpu:  # three times as fast as asking the device for its name
        return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    kind = x.device.type
    # autocast does not know the meta device and raises when asked about it
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def castable(dtype: torch.dtype) -> bool:
    """Whether autocast casts tensors of ``dtype``: floating point up to 32 bits."""
    return dtype.is_floating_point and dtype != torch.float64
