"""Masks that are chosen once and held: scoring, choosing, applying."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..autograd import WeightTransform, masked
from ..nn import NMWeight
from ..pattern import CheckpointError, RecipeError
from .base import State
from .inputs import InputNorms
from .search.channels import Channels
from .search.permutation import Found
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

    ``score`` is one of ``SCORES``, None for recipes that hold no mask; ``channels`` reorders channels just before the masks are chosen.
    """

    def __init__(self, layers: dict[str, NMWeight], score: str | None, channels: Channels | None = None) -> None:
        self.layers, self.score, self.channels = layers, score, channels
        self.masks: dict[str, Tensor] = {}
        self.inputs = InputNorms(layers)

    def load(self, held: dict[str, dict[str, Tensor]], state: State) -> None:
        """Hold the masks that a checkpoint has, and no others."""
        found = {name: values[MASK] for name, values in held.items() if MASK in values}
        self.masks = {name: mask.to(self.layers[name].master.device, torch.bool) for name, mask in found.items()}
        if found and self.channels is not None:
            self.channels.resume(state.get("kept", {}))

    def adopt(self, state: State, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        """Hold the masks that are held already, or choose them; weights outside become +0. ``optimizers``: all that update the model."""
        if not self.masks:
            self.permute_(state, optimizers)
        for name, layer in self.layers.items():
            if name not in self.masks:  # or a checkpoint has left out the mask of a frozen weight
                self.masks[name] = self._choose(name, layer)
            self.apply(name)

    def permute_(self, state: State, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        """Reorder channels for the masks to be chosen, where the recipe wants it; ``state`` keeps what each layer gained."""
        if self.channels is not None:
            self._moved(self.channels.permute_(self._scores(), optimizers))
            state["kept"] = self.channels.kept

    @contextmanager
    def permuted(self, wanted: bool) -> Iterator[None]:
        """The same inside if ``wanted``, undone outside."""
        if self.channels is None or not wanted:
            yield
            return
        squares = dict(self.inputs.squares)
        try:
            with self.channels.permuted(self._scores()) as found:
                self._moved(found)
                yield
        finally:
            self.inputs.squares = squares

    def _moved(self, found: dict[str, Found]) -> None:
        # the norms of a layer's inputs move with them
        squares = self.inputs.squares
        squares.update({name: squares[name][f.order] for name, f in found.items() if name in squares})

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
            raise RecipeError(
                f'ASP(score="existing"): the weight of layer {name!r} is not {layer.pattern}, so there is no mask to adopt. '
                'Use score="magnitude", another pattern, or leave the layer out with filter_fn.'
            )
        return ops.mask(self._scores()(name), layer.pattern)

    def _scores(self) -> Callable[[str], Tensor]:
        """What the mask ranks the elements of each layer by."""
        if self.score != "wanda":
            return lambda name: self.layers[name].master.detach()
        missing = self.inputs.missing()
        if missing:
            raise RecipeError(
                f'ASP(score="wanda") ranks weights by their inputs and has seen none for {", ".join(missing)}. Run a few batches first: '
                "with handle.calibrate(): model(batch), or leave out layers that the model does not call with filter_fn. When resuming, "
                "load the optimizer's state dict before attach: it has the masks."
            )
        return self.inputs.score
