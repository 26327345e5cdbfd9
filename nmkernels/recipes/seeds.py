"""Random words of the gradient estimates: one stream per layer, data-parallel rank and run, kept in the recipe's state."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from ..nn import NMWeight
from ..pattern import CheckpointError

if TYPE_CHECKING:
    from .base import State


def stream_key(seed: int, layer: str, rank: int) -> int:
    """The 64-bit key of one layer's stream, a signed number: a hash of the run's seed, the layer's name and the process's rank.

    Example:
        >>> stream_key(0, "fc", 0) != stream_key(0, "fc", 1) != stream_key(1, "fc", 1)
        True
    """
    digest = hashlib.blake2b(f"{seed}/{rank}/{layer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class Seeds:
    """The (seed, offset) words of one handle's layers; a recipe that draws estimates has ``seed`` in its state.

    ``state["streams"]`` (name -> int64 ``(2,)``) holds the very tensors whose offsets the backward passes advance on the device, so that
    the optimizer's state dict has them as they are. The keys are those of this process whatever rank wrote the checkpoint.
    """

    def __init__(self, layers: dict[str, NMWeight]) -> None:
        self.layers = layers

    def adopt(self, state: State) -> None:
        """Give every layer its stream: those of ``state`` go on, missing ones begin at offset 0."""
        if "seed" not in state:
            return
        streams = state.setdefault("streams", {})
        for name, layer in self.layers.items():
            words = (
                streams[name].to(layer.weight.device) if name in streams else torch.zeros(2, dtype=torch.int64, device=layer.weight.device)
            )
            words[0] = stream_key(state["seed"], name, _rank())
            streams[name] = layer.seed = words

    def check(self, state: State) -> None:
        """Raise ``CheckpointError`` if ``state`` carries streams of other layers than these."""
        odd = sorted(set(state.get("streams", self.layers)) ^ set(self.layers))
        if odd:
            raise CheckpointError(
                f"the checkpoint's random streams are of other layers than this model's; only one of them has {', '.join(odd)}."
            )

    def forget(self) -> None:
        """Take the streams from the layers."""
        for layer in self.layers.values():
            layer.__dict__["seed"] = None


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0
