"""Masks that are chosen once and held: scoring, choosing, applying."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..autograd import WeightTransform, masked
from ..nn import NMWeight
from ..pattern import CheckpointError, RecipeError
from ..recipes.contract import State
from .inputs import InputNorms
from .state import MASK, check_layers

SCORES = ("magnitude", "wanda", "existing")


@dataclass(frozen=True, eq=False)
class HeldMask(WeightTransform):
    """W̃ = M ⊙ W with a mask that does not follow the weight."""

    mask: Tensor

    def __call__(self, weight: Tensor, *extras: Tensor, out: Tensor | None = None) -> Tensor:
        return masked(weight, self.mask, out)


class HeldMasks:
    """The held masks of one run; ``masks`` (name -> bool ``(out, in)``) is empty until they are chosen.

    ``score`` is one of ``SCORES``, None for recipes that hold no mask; ``trained``: whether the layers got gradients before ``attach``.
    """

    def __init__(self, layers: dict[str, NMWeight], score: str | None, trained: Callable[[], bool] = bool) -> None:
        self.layers, self.score, self._trained = layers, score, trained
        self.masks: dict[str, Tensor] = {}
        self.inputs = InputNorms(layers)

    def load(self, held: dict[str, dict[str, Tensor]]) -> None:
        """Hold the masks that a checkpoint has, and no others."""
        found = {name: values[MASK] for name, values in held.items() if MASK in values}
        self.masks = {name: mask.to(self.layers[name].master.device, torch.bool) for name, mask in found.items()}

    def adopt(self) -> None:
        """Hold the masks that are held already, or choose them; weights outside become +0."""
        for name, layer in self.layers.items():
            if name not in self.masks:  # none yet, or a checkpoint has left out the mask of a frozen weight
                self.masks[name] = self._choose(name, layer)
            self.apply(name)

    def check(self, state: State) -> None:
        masks = {name: values[MASK] for name, values in state.get("held", {}).items() if MASK in values}
        trained = {name: layer for name, layer in self.layers.items() if name in masks or layer.parameter.requires_grad}
        if masks:
            check_layers("masks", masks, trained)
        for name, mask in masks.items():
            if mask.shape != self.layers[name].master.shape:
                shape = self.layers[name].shape
                raise CheckpointError(f"the checkpoint's mask of layer {name!r} is of another shape than its weight {shape}.")

    def forget(self) -> None:
        self.masks = {}

    @torch.no_grad()
    def apply(self, name: str) -> None:
        """Set the weights outside the mask of layer ``name`` to +0, whatever they are (NaN times 0 would stay NaN)."""
        self.layers[name].master.masked_fill_(~self.masks[name], 0.0)

    @torch.no_grad()
    def lost(self, name: str) -> Tensor:
        """How many weights of layer ``name`` are not zero outside its mask, 0-d."""
        return self.layers[name].master.masked_fill(self.masks[name], 0.0).count_nonzero()

    def preview(self, name: str) -> HeldMask | None:
        """The transform of the mask that is held, or would be chosen now; None where it is the plain mask by magnitude."""
        if name in self.masks:
            return HeldMask(self.layers[name].pattern, self.masks[name])
        if self.score in ("wanda", "existing"):
            return HeldMask(self.layers[name].pattern, self._choose(name, self.layers[name]))
        return None

    def _choose(self, name: str, layer: NMWeight) -> Tensor:
        if self.score == "existing" and not ops.is_nm(layer.master.detach(), layer.pattern):
            if self._trained():
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
        if pruned is not None and pruned.shape == layer.master.shape:
            mask = stored(pruned.to(layer.master.device))  # zeros alone do not show which weights of value zero are kept
            if not bool(layer.master.detach().masked_fill(mask, 0.0).any()):
                return mask
        return ops.mask(self.scores(name), layer.pattern)

    def scores(self, name: str) -> Tensor:
        """``(out, in)``: the mask of layer ``name`` keeps the elements of largest magnitude."""
        return self.inputs.score(name) if self.score == "wanda" else self.layers[name].master.detach()

    def check_inputs(self) -> None:
        """Raise ``RecipeError`` where the score needs inputs and a layer has seen none."""
        missing = self.inputs.missing() if self.score == "wanda" else []
        if missing:
            raise RecipeError(
                f'ASP(score="wanda") ranks weights by their inputs and has seen none for {", ".join(missing)}. Run a few batches first: '
                "with handle.calibrate(): model(batch), or leave out layers that the model does not call with filter_fn. When resuming, "
                "load the optimizer's state dict before attach: it has the masks."
            )


def stored(packed: ops.Compressed) -> Tensor:
    """The mask of a compressed weight: what it stores, values of zero included."""
    ones = ops.Compressed(torch.ones_like(packed.values), packed.indices, packed.pattern, packed.shape)
    return ones.dense() != 0
