"""Low-rank adapters that a recipe trains beside its N:M weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..nn import NMWeight
from .state import stream_key

if TYPE_CHECKING:
    from .base import Recipe


def add_adapters(recipe: Recipe, layers: dict[str, NMWeight]) -> None:
    """Give every layer for which ``recipe`` wants one an adapter: L drawn from N(0, 1), R = 0.

    L is drawn on the CPU in float64, by the recipe's ``seed`` (None: torch's initial one) and the layer's name: the same on every
    device, in every dtype and on every rank.
    """
    seed = getattr(recipe, "seed", None)
    for name, layer in layers.items():
        rank = recipe.adapter_rank(*layer.master.shape)
        if rank:
            key = stream_key(torch.initial_seed() if seed is None else seed, f"adapter/{name}", 0)
            generator = torch.Generator().manual_seed(key & (2**63 - 1))
            layer.add_adapter(torch.randn(layer.master.shape[1], rank, generator=generator, dtype=torch.float64))
