"""The parts of a run: patterns, random streams, and what the layers hold.

To ``check`` raises ``CheckpointError`` where a checkpoint does not fit this model, before anything changes; to ``load`` forgets everything
and takes what the checkpoint has; to ``begin`` takes from the present weights what a stage needs and is not there yet.

What a part has to keep is in the schedule's state, which lies in the optimizer. Tensors as large as the weights are not, while a run lasts;
checkpoints have them as ``state["held"]`` (layer -> name -> tensor).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import ops
from ..autograd.transforms import WeightTransform, masked, read_as
from ..layouts import REDUCED
from ..nn.sharding import data_dims
from ..nn.weight import NMWeight
from ..pattern import CheckpointError, NMError, Pattern, RecipeError, ShapeError
from ..recipes.contract import Recipe, Stage, State, generator_of, stream_key
from ..shards import is_sharded, own_rank
from .guards import Guards
from .input_norms import InputNorms
from .report import Report

MASK = "mask"
"""The name of a mask that is chosen once among what a layer holds; transforms' own begin with ``nm_``."""


def check_layers(what: str, names: Iterable[str], layers: Mapping[str, NMWeight]) -> None:
    """Raise ``CheckpointError`` unless a checkpoint's ``what`` belong to exactly these ``layers``."""
    mismatched = sorted(set(names) ^ set(layers))
    if mismatched:
        raise CheckpointError(
            f"the checkpoint's {what} belong to other layers than this model has; only one of them has {', '.join(mismatched)}."
        )


class Patterns:
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
            try:
                self._check_divides("sparsify_", name, pattern)
            except ShapeError as error:
                raise ShapeError(f"layer {name!r}: {error}") from error
        self._set()

    def begin(self, state: State) -> None:
        if self.own:
            state["patterns"] = {name: str(pattern) for name, pattern in self.own.items()}

    def load(self, saved: State) -> None:
        self.own = {name: Pattern(text) for name, text in saved.get("patterns", {}).items()}
        self._set()

    def _set(self) -> None:
        for name, layer in self.layers.items():
            layer.pattern = self.own.get(name, Pattern(self.recipe.pattern))
        for i, entry in enumerate(self.report.entries):
            if entry.sparse and entry.name in self.layers:
                layer = self.layers[entry.name]
                self.report.entries[i] = replace(entry, reason=self.recipe.layer(layer.pattern, layer.shape).note)

    def check(self, saved: State) -> None:
        patterns = saved.get("patterns", {})
        if patterns:
            check_layers("patterns", patterns, self.layers)
        for name, text in patterns.items():
            try:
                self._check_divides("resume", name, Pattern(text))
            except NMError as error:
                raise CheckpointError(f"the checkpoint's pattern of layer {name!r} does not fit: {error}") from error

    def _check_divides(self, verb: str, name: str, pattern: Pattern) -> None:
        layer = self.layers[name]
        pattern.check_divides(verb, layer.parameter.shape[REDUCED[layer.layout]], "in_features")


class Streams:
    """The (seed, offset) pairs of the layers' gradient estimates; a recipe that draws random numbers has ``seed`` in its state.

    ``state["streams"]`` (name -> int64 ``(2,)``) holds the very tensors whose offsets the backward passes advance on the device. The seeds
    are those of this process, whichever rank wrote the checkpoint and however many ranks there were.

    Ranks that see different data draw different numbers. Those that tensor parallelism gives the same output gradient (row parallel, or a
    replicated weight) draw the same, or replicas would part; in column parallel each has other columns of the gradient and its own key.
    """

    def __init__(self, layers: dict[str, NMWeight]) -> None:
        self.layers = layers

    def begin(self, state: State) -> None:
        if "seed" not in state:
            return
        streams = state.setdefault("streams", {})
        for name, layer in self.layers.items():
            words = streams[name] if name in streams else torch.zeros(2, dtype=torch.int64)
            words = words.to(layer.master.device)
            words[0] = stream_key(state["seed"], name, stream_rank(layer))
            streams[name] = layer.seed = words

    def check(self, saved: State) -> None:
        check_layers("random streams", saved.get("streams", self.layers), self.layers)

    def end(self) -> None:
        for layer in self.layers.values():
            if isinstance(layer, NMWeight):  # densify_ may have made it dense
                layer.seed = None


def stream_rank(layer: NMWeight) -> int:
    """The rank whose random stream this process uses for ``layer``: the first of those that see the same gradient of its output."""
    weight = layer.parameter
    if not is_sharded(weight):
        return own_rank()
    mesh = weight.device_mesh  # type: ignore[attr-defined]
    place = list(mesh.get_coordinate())
    for dim, placement in enumerate(weight.placements):  # type: ignore[attr-defined]
        if dim >= data_dims(layer) and not placement.is_shard(1 - REDUCED[layer.layout]):
            place[dim] = 0
    return int(mesh.mesh[tuple(place)])


@dataclass(frozen=True, eq=False)
class HeldMask(WeightTransform):
    """W̃ = M ⊙ W with a mask that does not follow the weight."""

    mask: Tensor

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        return masked(weight, self.mask, out)


class Held:
    """What layers hold while the weights change: tensors of their transforms, and masks that are chosen once.

    Tensors that a transform reads are chosen when a stage begins, and again after every k-th applied step. Layers have them as buffers
    outside the model's state dict, ``names`` says which; ``state["held_steps"]`` counts the applied steps of the present stage.

    ``masks`` (name -> bool ``(out, in)``) are chosen at the beginning of the first stage that holds a mask, by ``score``, and stay. Weights
    outside are set to +0. ``guards`` know whether there were gradients before ``attach``.
    """

    def __init__(self, layers: dict[str, NMWeight], score: str | None, guards: Guards) -> None:
        self.layers, self.score, self._guards = layers, score, guards
        self.masks: dict[str, Tensor] = {}
        self.names: dict[str, set[str]] = {}
        self.inputs = InputNorms(layers)

    def check(self, saved: State) -> None:
        held = saved.get("held", {})
        unknown = sorted(set(held) - set(self.layers))
        if unknown:
            raise CheckpointError(f"the checkpoint holds masks of layers that this model does not have: {', '.join(unknown)}.")
        masks = {name: tensors[MASK] for name, tensors in held.items() if MASK in tensors}
        if masks:
            check_layers("masks", masks, {name: x for name, x in self.layers.items() if name in masks or x.parameter.requires_grad})
        for name, mask in masks.items():
            if mask.shape != self.layers[name].master.shape:
                shape = self.layers[name].shape
                raise CheckpointError(f"the checkpoint's mask of layer {name!r} has a different shape from its weight {shape}.")

    def load(self, saved: State) -> None:
        self.masks, self.names = {}, {}
        for name, tensors in saved.get("held", {}).items():
            self._hold(name, {key: value for key, value in tensors.items() if key != MASK})
            if MASK in tensors:
                self.masks[name] = tensors[MASK].to(self.layers[name].master.device, torch.bool)

    def begin(self, state: State, stage: Stage) -> None:
        if not state or not stage.held_mask:
            self.masks = {}
        for name in self.layers if state and stage.held_mask else ():
            if name not in self.masks:  # none yet, or a checkpoint has left out the mask of a frozen weight
                self.masks[name] = self._choose_mask(name)
            self.apply(name)
        missing = {
            name: self.names.get(name) != keys for name, layer in self.layers.items() if (keys := set(read_as("held", layer.transform)))
        }
        if not missing:
            self.names = {}
            state.pop("held_steps", None)
        elif "held_steps" not in state or all(missing.values()):
            state["held_steps"] = 0
            self.renew(state)
        else:  # of frozen weights, which trainers' checkpoints leave out
            for name in (name for name in missing if missing[name]):
                self._hold(name, self._choose(name, self.layers[name].transform, set(), state))

    def save(self) -> State:
        """What a checkpoint has in addition to the state."""
        held = {name: {key: getattr(self.layers[name], key) for key in sorted(keys)} for name, keys in self.names.items() if keys}
        for name, mask in self.masks.items():
            held.setdefault(name, {})[MASK] = mask
        return {"held": held} if held else {}

    # ---- tensors of transforms

    def renew(self, state: State) -> None:
        """Choose what every layer's transform holds again, from the present weights."""
        for name, layer in self.layers.items():
            # what a layer still holds from another run was never chosen in this one
            self._hold(name, self._choose(name, layer.transform, self.names.get(name, set()), state))

    def preview(self) -> None:
        """Choose what every layer's last transform would hold of the present weights, before a stage that does; no state keeps it."""
        for name, layer in self.layers.items():
            layer.hold(self._choose(name, layer.final, set(), {"held_steps": 0}))

    def _hold(self, name: str, tensors: dict[str, Tensor]) -> None:
        if tensors:
            self.layers[name].hold(tensors)
            self.names[name] = set(tensors)

    @torch.no_grad()
    def _choose(self, name: str, transform: WeightTransform | None, known: set[str], state: State) -> dict[str, Tensor]:
        if transform is None or not read_as("held", transform):
            return {}
        layer = self.layers[name]
        generator = generator_of(state.get("seed", 0), f"held/{state['held_steps']}/{name}")
        extras = [None if kind == "held" and key not in known else getattr(layer, key, None) for key, kind in transform.reads.items()]
        return transform.renew(layer.master.detach(), extras, generator)

    # ---- masks that are chosen once

    @torch.no_grad()
    def apply(self, name: str) -> None:
        """Set the weights outside the mask of layer ``name`` to +0, whatever they are (NaN times 0 would stay NaN)."""
        self.layers[name].master.masked_fill_(~self.masks[name], 0.0)

    @torch.no_grad()
    def lost(self, name: str) -> int:
        """How many weights of layer ``name`` are not zero outside its mask; 0 where it holds none."""
        return int(self.layers[name].master.masked_fill(self.masks[name], 0.0).count_nonzero()) if name in self.masks else 0

    def final_mask(self, name: str) -> HeldMask | None:
        """The transform of the mask that is held, or would be chosen now; None where it is the plain mask by magnitude."""
        if name not in self.masks and self.score not in ("wanda", "existing"):
            return None
        mask = self.masks[name] if name in self.masks else self._choose_mask(name)
        return HeldMask(self.layers[name].pattern, mask)

    def _choose_mask(self, name: str) -> Tensor:
        layer = self.layers[name]
        weight = layer.master.detach()
        if self.score == "existing" and not ops.is_nm(weight, layer.pattern):
            if self._guards.trained:
                raise RecipeError(
                    f"the weight of layer {name!r} is not {layer.pattern} any more: it was trained before handle.attach(optimizer), so "
                    "nothing held its mask. Prune again, by prune_ or handle.remove() and sparsify_, and attach the optimizer before the "
                    "first step."
                )
            raise RecipeError(
                f'ASP(score="existing"): the weight of layer {name!r} is not {layer.pattern}, so there is no mask to adopt. '
                'Use score="magnitude", another pattern, or leave the layer out with filter_fn.'
            )
        self.check_inputs()
        pruned = layer.effective.pruned if self.score == "existing" else None
        if pruned is not None and pruned.shape == weight.shape:
            mask = stored(pruned.to(weight.device))  # zeros alone do not show which weights of value zero are kept
            if not bool(weight.masked_fill(mask, 0.0).any()):
                return mask
        return ops.mask(self.scores(name), layer.pattern)

    def scores(self, name: str) -> Tensor:
        """``(out, in)``: the mask of layer ``name`` keeps the elements of largest magnitude."""
        return self.inputs.score(name) if self.score == "wanda" else self.layers[name].master.detach()

    def reorder(self, name: str, order: Tensor) -> None:
        """The columns of layer ``name`` are in another order now."""
        if name in self.inputs.squares:
            self.inputs.squares[name] = self.inputs.squares[name][order]

    def check_inputs(self) -> None:
        """Raise ``RecipeError`` where the score needs inputs and a layer has seen none."""
        if missing := [name for name in self.layers if not int(self.inputs.tokens.get(name, 0))] if self.score == "wanda" else []:
            raise RecipeError(
                f'ASP(score="wanda") ranks weights by their inputs and has seen none for {", ".join(missing)}. Run a few batches first: '
                "with handle.calibrate(): model(batch), or leave out layers that the model does not call with filter_fn. When resuming, "
                "load the optimizer's state dict before attach: it has the masks."
            )


def stored(packed: ops.Compressed) -> Tensor:
    """The mask of a compressed weight: what it stores, values of zero included."""
    ones = ops.Compressed(torch.ones_like(packed.values), packed.indices, packed.pattern, packed.shape)
    return ones.dense() != 0
