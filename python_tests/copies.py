"""The two ways in which a model gets copied whole: ``copy.deepcopy``, and through a pickle file."""

from __future__ import annotations

import copy
import io

import torch
from torch import nn

WAYS = ("deepcopy", "pickle")


def copied(module: nn.Module, how: str) -> nn.Module:
    """A copy of ``module`` made in the given way."""
    if how == "deepcopy":
        return copy.deepcopy(module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
