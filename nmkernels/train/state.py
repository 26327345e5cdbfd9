"""What a resumed run needs of an earlier one: the layers' patterns, held tensors and random streams.

Masks that are chosen once are in masks.py. Each component has ``adopt(state)``, which gives the layers what the state holds and adds what
is missing there, and ``check(state)``, which raises ``CheckpointError`` where the state is of other layers. Tensors as large as the weights
are not in the state while a run lasts; checkpoints have them as ``state["held"]`` (layer -> name -> tensor).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..autograd.transforms import WeightTransform, read_as
from ..layouts import REDUCED
from ..nn.sharding import data_dims
from ..nn.weight import NMWeight
from ..pattern import CheckpointError, NMError, Pattern, ShapeError
from ..recipes.contract import Recipe, State
from ..shards import is_sharded
from .report import Report

MASK = "mask"
"""The name of a mask that is chosen once among what a layer holds; transforms' own begin with ``nm_``."""


def check_layers(what: str, given: Iterable[str], layers: dict[str, NMWeight]) -> None:
    """Raise ``CheckpointError`` unless a checkpoint's ``what`` are of exactly these ``layers``."""
    odd = sorted(set(given) ^ set(layers))
    if odd:
        raise CheckpointError(f"the checkpoint's {what} are of other layers than this model's; only one of them has {', '.join(odd)}.")


# ---- random streams


def stream_key(seed: int, layer: str, rank: int) -> int:
    """The 64-bit key of one layer's stream, a signed number: a hash of the run's seed, the layer's name and the process's rank."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{rank}/{layer}".encode(), digest_size=8).digest(), "little", signed=True)


def generator_of(seed: int, what: str) -> torch.Generator:
    """A generator on the CPU, the same on every rank: the replicas of a weight must hold the same."""
    return torch.Generator().manual_seed(stream_key(seed, what, 0) & (2**63 - 1))


class Streams:
    """The (seed, offset) pairs of the layers' gradient estimates; a recipe that draws random numbers has ``seed`` in its state.

    ``state["streams"]`` (name -> int64 ``(2,)``) holds the very tensors whose offsets the backward passes advance on the device. The seeds
    are those of this process, whichever rank wrote the checkpoint and however many ranks there were.

    Ranks that see different data draw different numbers: those of DistributedDataParallel, FSDP2 and HSDP, replicas too. Those that
    tensor parallelism gives the same output gradient (row parallel, or a replicated weight) draw the same, as one process would, or
    replicas would part. In column parallel each has other columns of the gradient and a key of its own.
    """

    def __init__(self, layers: dict[str, NMWeight]) -> None:
        self.layers = layers

    def adopt(self, state: State) -> None:
        """Give every layer its stream: those of ``state`` go on, missing ones begin at offset 0."""
        if "seed" not in state:
            return
        streams = state.setdefault("streams", {})
        for name, layer in self.layers.items():
            words = streams[name] if name in streams else torch.zeros(2, dtype=torch.int64)
            words = words.to(layer.master.device)
            words[0] = stream_key(state["seed"], name, stream_rank(layer))
            streams[name] = layer.seed = words

    def check(self, state: State) -> None:
        check_layers("random streams", state.get("streams", self.layers), self.layers)

    def forget(self) -> None:
        for layer in self.layers.values():
            if isinstance(layer, NMWeight):  # densify_ may have been here
                layer.seed = None


def stream_rank(layer: NMWeight) -> int:
    """The rank whose random stream this process uses for ``layer``: the first of those that see the same gradient of its output."""
    weight: Any = layer.parameter
    if not is_sharded(weight):
        return own_rank()
    mesh = weight.device_mesh
    place = list(mesh.get_coordinate())
    for dim, placement in enumerate(weight.placements):
        if dim >= data_dims(layer) and not placement.is_shard(1 - REDUCED[layer.layout]):
            place[dim] = 0
    return int(mesh.mesh[tuple(place)])


def own_rank() -> int:
    """This process among those of ``torch.distributed``; 0 where there is no other."""
    return torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0


# ---- patterns


class LayerPatterns:
    """The pattern of each layer: that of the recipe, or the layer's own where the recipe shares a budget out.

    ``state["patterns"]`` (name -> N:M) is there only for such recipes; a resumed run takes the patterns from there.
    """

    def __init__(self, recipe: Recipe, layers: dict[str, NMWeight], report: Report) -> None:
        self.recipe, self.layers, self.report = recipe, layers, report
        self.own: dict[str, Pattern] = {}

    def choose(self) -> None:
        """Give every layer the pattern that the recipe gives it for the present weights."""
        choose = self.recipe.setup.patterns
        self.own = {} if choose is None else choose({name: layer.master.detach() for name, layer in self.layers.items()})
        for name, pattern in self.own.items():
            layer = self.layers[name]
            try:
                pattern.check_divides("sparsify_", layer.parameter.shape[REDUCED[layer.layout]], "in_features")
            except ShapeError as error:
                raise ShapeError(f"layer {name!r}: {error}") from error
        self._give()

    def save(self, state: State) -> None:
        if self.own:
            state["patterns"] = {name: str(pattern) for name, pattern in self.own.items()}

    def adopt(self, state: State) -> bool:
        """Give the layers the patterns of ``state``; True if one of them has changed."""
        before, self.own = self.own, {name: Pattern(text) for name, text in state.get("patterns", {}).items()}
        self._give()
        return self.own != before

    def _give(self) -> None:
        for name, layer in self.layers.items():
            layer.pattern = self.own.get(name, Pattern(self.recipe.pattern))
        for i, entry in enumerate(self.report.entries):
            if entry.sparse and entry.name in self.layers:
                layer = self.layers[entry.name]
                self.report.entries[i] = replace(entry, reason=self.recipe.layer(layer.pattern, layer.shape).note)

    def check(self, state: State) -> None:
        patterns = state.get("patterns", {})
        if patterns:
            check_layers("patterns", patterns, self.layers)
        for name, text in patterns.items():
            layer = self.layers[name]
            try:
                Pattern(text).check_divides("resume", layer.parameter.shape[REDUCED[layer.layout]], "in_features")
            except NMError as error:
                raise CheckpointError(f"the checkpoint's pattern of layer {name!r} does not fit: {error}") from error


# ---- held tensors


class HeldTensors:
    """What the layers' transforms hold between renewals: chosen when a stage begins and after every k-th applied step.

    The layers keep them as buffers outside the model's state dict, ``names`` says which; ``state["held_steps"]`` counts the applied steps
    of the present stage.
    """

    def __init__(self, layers: dict[str, NMWeight]) -> None:
        self.layers = layers
        self.names: dict[str, set[str]] = {}

    def values(self) -> dict[str, dict[str, Tensor]]:
        """What is held, by layer and name."""
        return {name: {key: getattr(self.layers[name], key) for key in sorted(keys)} for name, keys in self.names.items() if keys}

    def load(self, held: dict[str, dict[str, Tensor]]) -> None:
        """Hold what a checkpoint has, and nothing else."""
        self.names = {}
        for name, values in held.items():
            self._hold(name, {key: value for key, value in values.items() if key != MASK})

    def _hold(self, name: str, values: dict[str, Tensor]) -> None:
        if values:
            self.layers[name].hold(values)
            self.names[name] = set(values)

    def _wanting(self) -> dict[str, bool]:
        """The layers whose present transform holds something, and whether they hold it."""
        wanted = {name: set(read_as("held", layer.transform)) for name, layer in self.layers.items()}
        return {name: self.names.get(name) == keys for name, keys in wanted.items() if keys}

    def adopt(self, state: State) -> None:
        """Have every layer hold what its present transform needs; what it does not hold yet is chosen now."""
        wanting = self._wanting()
        if not wanting:
            self.names = {}
            state.pop("held_steps", None)
        elif "held_steps" not in state or not any(wanting.values()):
            state["held_steps"] = 0
            self.renew(state)
        else:
            # of frozen weights, which trainers' checkpoints leave out
            for name in (name for name, held in wanting.items() if not held):
                self._hold(name, self._choose(name, self.layers[name].transform, set(), state))

    def due(self, state: State, every: int) -> bool:
        """Count one applied step; True if it was the ``every``-th since the last renewal, 0 for none."""
        state["held_steps"] += 1
        return every > 0 and state["held_steps"] % every == 0

    def renew(self, state: State) -> None:
        """Choose what every layer holds again, from the present weights."""
        for name, layer in self.layers.items():
            # what a layer still holds of another run was never chosen in this one
            self._hold(name, self._choose(name, layer.transform, self.names.get(name, set()), state))

    def preview(self) -> None:
        """Choose what every layer's last transform would hold of the present weights, before a stage that does; no state keeps it."""
        for name, layer in self.layers.items():
            layer.hold(self._choose(name, layer.final, set(), {"held_steps": 0}))

    @torch.no_grad()
    def _choose(self, name: str, transform: WeightTransform | None, known: set[str], state: State) -> dict[str, Tensor]:
        if transform is None or not read_as("held", transform):
            return {}
        layer = self.layers[name]
        generator = generator_of(state.get("seed", 0), f"held/{state['held_steps']}/{name}")
        extras = [None if kind == "held" and key not in known else getattr(layer, key, None) for key, kind in transform.reads.items()]
        return transform.renew(layer.master.detach(), extras, generator)

    def check(self, state: State) -> None:
        odd = sorted(set(state.get("held", {})) - set(self.layers))
        if odd:
            raise CheckpointError(f"the checkpoint holds masks of layers that this model does not have: {', '.join(odd)}.")
