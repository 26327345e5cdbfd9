"""What transforms hold between renewals: chosen when a stage begins and after every k-th applied step, kept in the recipe's state.

Random words of the gradient estimates: one stream per layer, data-parallel rank and run, kept in the recipe's state.

The pattern of each layer: that of the recipe, or the layer's own where the recipe shares a budget out, kept in the recipe's state.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autograd.transforms import read_as
from ..nn import NMWeight
from ..pattern import CheckpointError, NMError, Pattern, ShapeError
from .report import Report

if TYPE_CHECKING:
    from .base import Recipe, State


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


class Shares:
    """The patterns of one handle's layers.

    ``state["patterns"]`` (name -> N:M) is there only for recipes that give layers patterns of their own; a resumed run takes the patterns
    from there and never shares out anew.
    """

    def __init__(self, recipe: Recipe, layers: dict[str, NMWeight], report: Report) -> None:
        self.recipe, self.layers, self.report = recipe, layers, report
        self.own: dict[str, Pattern] = {}

    def choose(self) -> None:
        """Give every layer the pattern that the recipe gives it for the present weights.

        Raises:
            ShapeError: M does not divide a layer's inputs.
        """
        self.own = self.recipe.layer_patterns({name: layer.master.detach() for name, layer in self.layers.items()}) or {}
        for name, pattern in self.own.items():
            try:
                pattern.check_divides("sparsify_", self.layers[name].master.shape[1], "in_features")
            except ShapeError as error:
                raise ShapeError(f"layer {name!r}: {error}") from error
        self._give(self.own)

    def save(self, state: State) -> None:
        """Keep the patterns in ``state``."""
        if self.own:
            state["patterns"] = {name: str(pattern) for name, pattern in self.own.items()}

    def adopt(self, state: State) -> bool:
        """Give the layers the patterns of ``state``; True if one of them has changed."""
        before = dict(self.own)
        self.own = {name: Pattern(text) for name, text in state.get("patterns", {}).items()}
        self._give(self.own)
        return self.own != before

    def _give(self, patterns: dict[str, Pattern]) -> None:
        for name, layer in self.layers.items():
            layer.pattern = patterns.get(name, Pattern(self.recipe.pattern))
        for i, entry in enumerate(self.report.entries):
            if entry.sparse and entry.name in self.layers:
                layer = self.layers[entry.name]
                self.report.entries[i] = replace(entry, reason=self.recipe.note(layer.pattern, shape_of(layer)))

    def check(self, state: State) -> None:
        """Raise ``CheckpointError`` if ``state`` has patterns of other layers than these."""
        patterns = state.get("patterns")
        if patterns is None:
            return
        odd = sorted(set(patterns) ^ set(self.layers))
        if odd:
            raise CheckpointError(
                f"the checkpoint's patterns are of other layers than this model's; only one of them has {', '.join(odd)}."
            )
        for name, text in patterns.items():
            try:
                Pattern(text).check_divides("resume", self.layers[name].master.shape[1], "in_features")
            except NMError as error:
                raise CheckpointError(f"the checkpoint's pattern of layer {name!r} does not fit: {error}") from error


def pattern_in(state: State, name: str, layer: NMWeight) -> Pattern:
    """The pattern that layer ``name`` has in ``state``."""
    text = state.get("patterns", {}).get(name)
    return layer.pattern if text is None else Pattern(text)


def shape_of(layer: NMWeight) -> tuple[int, int]:
    """``(out, in)`` of a layer's weight."""
    rows, cols = layer.master.shape
    return int(rows), int(cols)


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
        wanted = {name: read_as("held", layer.transform) for name, layer in self.layers.items()}
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
        wanted = {name: set(read_as("held", layer.transform)) for name, layer in self.layers.items()}
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
            if transform is None or not read_as("held", transform):
                continue
            # what a layer still holds of another run was never chosen in this one
            known = held.get(name, {})
            extras = [None if kind == "held" and key not in known else getattr(layer, key, None) for key, kind in transform.reads.items()]
            values = transform.renew(layer.master.detach(), extras, self._generator(state, name))
            layer.hold(values)
            held[name] = {key: _saved(value) for key, value in values.items()}

    @torch.no_grad()
    def preview(self) -> None:
        """Choose what every layer's last transform would hold of the present weights, before a stage that does; no state keeps it."""
        for name, layer in self.layers.items():
            if read_as("held", layer.final):
                nothing = [None if kind == "held" else getattr(layer, key, None) for key, kind in layer.final.reads.items()]
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
