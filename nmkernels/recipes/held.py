"""What transforms hold between renewals: chosen when a stage begins and after every k-th applied step, kept in the recipe's state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..nn import NMWeight
from ..pattern import CheckpointError
from .seeds import stream_key

if TYPE_CHECKING:
    from .base import State

BITS = (1, 2, 4, 8, 16, 32, 64, 128)


class Held:
    """The held tensors of one handle's layers.

    ``state["held"]`` (layer -> name -> tensor, masks as bits) makes a resumed run go on with the very same ones; ``state["held_steps"]``
    counts the applied steps of the present stage. The layers keep them as buffers outside the model's state dict.
    """

    def __init__(self, layers: dict[str, NMWeight]) -> None:
        self.layers = layers

    def ensure(self, state: State) -> None:
        """Give every layer what its present transform holds: what ``state`` carries, or what is chosen now."""
        wanted = {name: layer.transform.holds for name, layer in self.layers.items() if layer.transform is not None}
        if not any(wanted.values()):
            state.pop("held", None)
            state.pop("held_steps", None)
        elif all(set(state.get("held", {}).get(name, {})) == set(names) for name, names in wanted.items()):
            for name, values in state["held"].items():
                self.layers[name].hold({key: _loaded(value) for key, value in values.items()})
        else:
            state["held_steps"] = 0
            self.renew(state)

    def begin(self, state: State) -> bool:
        """Count the steps of a new stage from 0; True if what the last one held goes on in it and is to be renewed."""
        wanted = {name: set(layer.transform.holds) for name, layer in self.layers.items() if layer.transform is not None}
        same = "held" in state and any(wanted.values()) and all(set(state["held"].get(name, {})) == names for name, names in wanted.items())
        if same:
            state["held_steps"] = 0
        return same

    def advance(self, state: State, every: int) -> bool:
        """Count one applied step; True if it was the ``every``-th since the last renewal, 0 for none."""
        if "held" not in state:
            return False
        state["held_steps"] += 1
        return every > 0 and state["held_steps"] % every == 0

    @torch.no_grad()
    def renew(self, state: State) -> None:
        """Choose anew, from the present weights, what every layer holds."""
        held = state.setdefault("held", {})
        for name, layer in self.layers.items():
            transform = layer.transform
            if transform is None or not transform.holds:
                continue
            # what a layer still holds of another run was never chosen in this one
            known = held.get(name, {})
            extras = [
                None if key in transform.holds and key not in known else value
                for key, value in zip(transform.reads, layer.extras_or_none(transform), strict=True)
            ]
            values = transform.renew(layer.master.detach(), extras, self._generator(state, name))
            layer.hold(values)
            held[name] = {key: _saved(value) for key, value in values.items()}

    @torch.no_grad()
    def preview(self) -> None:
        """Choose what every layer's last transform would hold of the present weights, before a stage that does; no state keeps it."""
        for name, layer in self.layers.items():
            if layer.final.holds:
                nothing = [
                    None if key in layer.final.holds else value
                    for key, value in zip(layer.final.reads, layer.extras_or_none(layer.final), strict=True)
                ]
                layer.hold(layer.final.renew(layer.master.detach(), nothing, self._generator({"held_steps": 0}, name)))

    @staticmethod
    def _generator(state: State, name: str) -> torch.Generator:
        # of rank 0 everywhere: the replicas of a weight must hold the same
        key = stream_key(state.get("seed", 0), f"held/{state['held_steps']}/{name}", 0)
        return torch.Generator().manual_seed(key & (2**63 - 1))

    def check(self, state: State) -> None:
        """Raise ``CheckpointError`` if ``state`` carries what other layers held."""
        odd = sorted(set(state.get("held", {})) - set(self.layers))
        if odd:
            raise CheckpointError(f"the checkpoint holds masks of layers that this model does not have: {', '.join(odd)}.")


def _saved(value: Tensor) -> Any:
    """A bool tensor as bits, eight to a byte; any other as it is."""
    if value.dtype != torch.bool:
        return value
    flat = value.flatten()
    bytes_ = F.pad(flat, (0, -len(flat) % 8)).view(-1, 8).to(torch.uint8) * torch.tensor(BITS, dtype=torch.uint8, device=value.device)
    return {"bits": bytes_.sum(1, dtype=torch.uint8), "shape": list(value.shape)}


def _loaded(value: Any) -> Tensor:
    """The inverse of ``_saved``."""
    if isinstance(value, Tensor):
        return value.clone()
    bits = value["bits"]
    flat = (bits[:, None] & torch.tensor(BITS, dtype=torch.uint8, device=bits.device)).ne(0).flatten()
    shape = tuple(value["shape"])
    return flat[: torch.Size(shape).numel()].view(shape)
