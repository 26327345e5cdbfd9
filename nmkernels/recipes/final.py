"""The last act of a recipe: master weights become the N:M weights that are deployed."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from .. import ops
from ..autograd import STRAIGHT_THROUGH, WeightTransform
from ..nn import NMWeight
from ..pattern import RecipeError
from .base import Recipe


def require_ran(layers: dict[str, NMWeight]) -> None:
    """Raise ``RecipeError`` if a layer never ran: then nothing was trained sparse there."""
    idle = [name for name, layer in layers.items() if not layer.ran]
    if idle:
        raise RecipeError(
            f"finish: these swapped layers never ran: {', '.join(idle)}. Their parent probably reads the weight itself, so it was "
            "never masked. Leave them out with filter_fn, or call finish(allow_unused=True) if the model was not meant to run."
        )


class Gradients:
    """Sees whether a swapped layer gets a gradient before any attached optimizer has stepped: then somebody trains without the recipe.

    A pruned model that is only run, calibrated or adopted gets none. Hooks of the Parameters see it: a ``.grad`` may be older than the
    recipe, and is often cleared after a step. A weight that is frozen at first, or replaced by ``load_state_dict(assign=True)``, has none.
    """

    def __init__(self, layers: dict[str, NMWeight]) -> None:
        self.seen = False
        self.warned: set[str] = set()
        trained = [p for layer in layers.values() for p in (layer.weight, *layer.learned().values()) if p.requires_grad]
        self._removers = [p.register_post_accumulate_grad_hook(self._see) for p in trained]

    def _see(self, p: Tensor) -> None:
        self.seen = True

    def end(self) -> None:
        """Watch no longer."""
        while self._removers:
            self._removers.pop().remove()

    def warn(self, verb: str, recipe: Recipe, attached: bool) -> None:
        """Warn if there were gradients, once for each ``verb``; ``attached``: there is an optimizer, and it has not stepped."""
        if not self.seen or verb in self.warned:
            return
        self.warned.add(verb)
        missing = "no attached optimizer has made a step" if attached else "no optimizer was ever attached"
        warnings.warn(
            f"{verb}: the swapped layers got gradients, but {missing}. So nothing happened of what the recipe {recipe.name} does in "
            "optimizer steps (its schedule, decay, held masks, metrics). Before training, call handle.attach with the very optimizer "
            "that steps.",
            stacklevel=3,
        )


def warn_early(recipe: Recipe, early: str) -> None:
    """Warn, unless ``early`` is empty, that it is too early to finish for that reason."""
    if early:
        form = "the weights become dense" if recipe.final == "dense" else f"the weights become {recipe.pattern}"
        if recipe.final_activation() is not None:
            form = f"the activations become {recipe.pattern}"
        left = "the adapters add nothing" if recipe.final == "nm+adapter" else f"{form} without having been trained in that form"
        warnings.warn(
            f"finish: the recipe {recipe.name} {early}, so {left}; total_steps is probably larger than the number of steps taken.",
            stacklevel=3,
        )


@torch.no_grad()
def make_nm(layers: dict[str, NMWeight], transforms: dict[str, WeightTransform]) -> None:
    """Replace every layer's weight by what its transform makes of it, and take from the layer what only training needed.

    Raises:
        RecipeError: a weight is not finite, or a result is not N:M; then nothing has been changed.
    """
    for name, layer in layers.items():
        if not bool(torch.isfinite(layer.weight).all()):
            raise RecipeError(f"finish: the weight of layer {name!r} has NaN or infinite values; training diverged before this point.")
    pruned = {name: layers[name].transformed(transform) for name, transform in transforms.items()}
    orders = {name: _order(transform, layers[name].master.shape[1]) for name, transform in transforms.items()}
    for name, weight in pruned.items():
        order = orders[name]
        if not ops.is_nm(weight if order is None else weight[:, order.to(weight.device)], layers[name].pattern):
            raise RecipeError(f"finish: layer {name!r} is not {layers[name].pattern} after pruning; please report this bug.")
    for name, layer in layers.items():
        layer.master.copy_(pruned.pop(name))
        layer.use(None, STRAIGHT_THROUGH)
        layer.finished, layer.columns = True, orders[name]
        layer.forget(adapter=False)
        layer.adapts = True
        layer.effective.release()


def _order(transform: WeightTransform, cols: int) -> Tensor | None:
    columns = transform.traits.columns
    return None if columns is None else columns(cols)
