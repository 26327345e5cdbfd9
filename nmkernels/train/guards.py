"""What watches a run from outside: gradients without a step, and weights that something else reads or writes.

A step calls it in three places: before it (``written``), after it (``stepped``), and after those of other optimizers (``foreign_step``).
``NMKERNELS_GUARDS=0`` turns off everything that only warns.
"""

from __future__ import annotations

import copy
import os
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from ..layouts import CONV1D
from ..nn.experts import StackedWeight
from ..nn.weight import NMWeight
from ..recipes.contract import Recipe
from ..shards import is_sharded, own_rank
from .layer_names import listed

FORGOTTEN = 3
"""After so many steps of an optimizer that is not attached, without one of an attached optimizer, a warning follows. Wrappers such as
Lookahead make one around each of their own."""

SMALL = 0.01
"""The share of a gradient, or of what a penalty explains of one, that may be rounding."""


class Guards:
    """What has happened to the weights of a run without the recipe.

    Attributes:
        trained: whether the layers got gradients before the first step. Hooks of the Parameters see that, since a ``.grad`` may be older
            than the recipe, and is often cleared after a step.
        foreign, foreign_steps: the class of the last optimizer that stepped them without being attached, and how often since the last step
            of an attached one.
        hashes: of the weights that the recipe began with, until its first step; empty where it has taken nothing from them.
    """

    def __init__(self, recipe: Recipe, layers: dict[str, NMWeight]) -> None:
        self.recipe, self.layers = recipe, layers
        self.trained = False
        self.foreign, self.foreign_steps = "", 0
        self.hashes: dict[str, int | None] = {}
        self._stamps: dict[str, tuple[int, int]] = {}
        self._reported: set[str] = set()
        self._removers: list[Any] = []
        self._watches: list[Watch] = []
        self._read_elsewhere: list[str] = []
        self.on = os.environ.get("NMKERNELS_GUARDS", "1") != "0"

    def __deepcopy__(self, memo: dict[int, Any]) -> Guards:
        """Of copied layers, whose gradients nothing watches."""
        new = memo[id(self)] = copy.copy(self)
        own = {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items() if name not in ("_removers", "_watches")}
        new.__dict__.update(own, _removers=[], _watches=[])
        return new

    def watch(self) -> None:
        """Watch the gradients of the layers from now on."""
        if not self.on:
            return
        params = [p for layer in self.layers.values() for p in (layer.parameter, *layer.learned().values()) if p.requires_grad]
        self._removers = [p.register_post_accumulate_grad_hook(self._see_gradient) for p in params]
        self._watches = [
            Watch(self._read_elsewhere, name, layer)
            for name, layer in self.layers.items()
            # hooks that others have put there may change the gradient first
            if not (isinstance(layer, StackedWeight) or layer.parameter._backward_hooks or is_sharded(layer.parameter))
            and layer.parameter.requires_grad
        ]

    def load(self) -> None:
        """Other weights may have come, from a checkpoint or by a step: nothing is known of the present ones."""
        self.hashes, self._stamps = {}, {}

    def stepped(self, layers: Mapping[str, NMWeight]) -> None:
        """An attached optimizer has stepped the weights of ``layers``."""
        self.foreign, self.foreign_steps = "", 0
        self._stamps |= _stamps(layers)
        if self._removers:
            self._stop_seeing()
        if self._read_elsewhere:
            self._warn_of_readers()

    def end(self) -> None:
        self._stop_seeing()
        self._warn_of_readers()
        for watch in self._watches:
            watch.end()

    # ---- gradients without a step

    def _see_gradient(self, p: Tensor) -> None:
        self.trained = True

    def _stop_seeing(self) -> None:
        while self._removers:
            self._removers.pop().remove()

    def warn_of_gradients(self, verb: str, attached: bool) -> None:
        """Warn if there were gradients, once for each ``verb``; ``attached``: there is an optimizer, and it has not stepped."""
        if not self.trained or f"{verb}: gradients" in self._reported:
            return
        self._reported.add(f"{verb}: gradients")
        missing = "no attached optimizer has made a step" if attached else "no optimizer was ever attached"
        warnings.warn(
            f"{verb}: the sparse layers got gradients, but {missing}. So nothing that the recipe {self.recipe.name} does in optimizer "
            "steps has happened (its schedule, decay, held masks, metrics). Before training, call handle.attach with the optimizer that "
            "steps.",
            stacklevel=3,
        )

    # ---- weights that are read elsewhere

    def _warn_of_readers(self) -> None:
        names, self._read_elsewhere[:] = list(self._read_elsewhere), []
        if not names or own_rank() != 0:
            return
        warnings.warn(
            f"the weight of {listed(names)} gets a gradient from outside the layer too: something else reads it, such as a decoder that "
            "multiplies its transpose, or a penalty in the loss. Those readers see the dense weight during training, and the pruned one "
            "after finish(). For a penalty that may be right; a tied layer is left out with filter_fn.",
            stacklevel=3,
        )

    # ---- weights that are written elsewhere

    def hash_weights(self) -> None:
        """Something was taken from the present weights: until the first step ``replaced`` finds the layers with other weights."""
        self.hashes = {name: _hash(layer.master.detach()) for name, layer in self.layers.items()}

    def replaced(self) -> list[str]:
        """The layers whose weights have changed since ``hash_weights``."""
        return [name for name, before in self.hashes.items() if _hash(self.layers[name].master.detach()) != before]

    def written(self, layers: Mapping[str, NMWeight]) -> list[str]:
        """Which of ``layers`` were written since the last step of an attached optimizer, as far as that is known; see ``_stamps``."""
        now, before = _stamps(layers), self._stamps
        return [name for name in now if name in before and (self.foreign_steps or before[name] != now[name])]

    def foreign_step(self, kind: str, names: Iterable[str]) -> None:
        """An optimizer of class ``kind``, which is not attached, has stepped the layers ``names``; warn where it seems forgotten."""
        self.foreign, self.foreign_steps = kind, self.foreign_steps + 1
        if self.on and self.foreign_steps == FORGOTTEN and self.foreign not in self._reported:
            self._reported.add(self.foreign)
            warnings.warn(
                f"{self.foreign}.step: this optimizer trains {listed(names)}, and the recipe {self.recipe.name} is not attached to it: "
                f"since the last step of an attached optimizer it has made {FORGOTTEN} without schedule, decay or held masks. Continue "
                "with it by handle.attach(optimizer).",
                stacklevel=4,
            )

    def warn_of_lost(self, verb: str, lost: Mapping[str, int]) -> None:
        """Warn of layers whose weights are not zero outside their held masks, ``lost`` of each; of every layer once."""
        new = {name: count for name, count in lost.items() if name not in self._reported}
        if not new or not self.on:
            return
        self._reported.update(new)
        cause = (
            f"{self.foreign}, which is not attached, has stepped them {self.foreign_steps} times; continue with it by "
            "handle.attach(optimizer)"
            if self.foreign_steps
            else "since the last step of an attached optimizer they were written by something else, such as load_state_dict, an average of "
            "weights, or an optimizer that is not attached (handle.attach takes further ones)"
        )
        share = sum(new.values()) / sum(self.layers[name].master.numel() for name in new)
        warnings.warn(
            f"{verb}: the weights of {listed(new)} are not zero outside their held masks ({100 * share:.1f} % of them): {cause}. The "
            "masks stay, and finish() or the next step of an attached optimizer sets these weights to zero; handle.renew_masks() chooses "
            "masks from the present weights instead.",
            stacklevel=4,
        )


class Watch:
    """Finds out in one layer's first backward pass whether its weight is read elsewhere too; a copy or pickle of the layer has none.

    The gradient of the Parameter in one backward pass is compared with the gradients from the layer's own calls: it is the same tensor,
    or their sum. Any rest is from elsewhere, unless it is a combination of w and sign(w), as a penalty on the weight gives.
    """

    def __init__(self, read_elsewhere: list[str], name: str, layer: NMWeight) -> None:
        self.read_elsewhere, self.name, self.layer = read_elsewhere, name, layer
        self.parameter = weakref.ref(layer.parameter)  # fully_shard replaces it, and then frees it
        self.from_calls: Tensor | None = None
        self._pass = -1
        self._remover = layer.parameter.register_hook(self._arrived)
        layer.watch = self

    def see(self, result: Tensor, weight: Tensor, index: int) -> None:
        """``result`` is what the layer's autograd Function made of ``weight``, its input of that index."""
        node: Any = result.grad_fn
        parameter = self.parameter()
        ours = parameter is not None and (weight is parameter or weight._base is parameter)
        if ours and type(result) is Tensor and isinstance(node, BackwardCFunction):
            node.register_hook(lambda inputs, outputs: self._gave(inputs[index]))

    def _gave(self, gradient: Tensor | None) -> None:
        if gradient is None or getattr(self.layer, "watch", None) is None:
            return
        now = torch._C._current_graph_task_id()
        # held, so that autograd adds nothing to it in place
        self.from_calls = gradient if self.from_calls is None or self._pass != now else self.from_calls + gradient
        self._pass = now

    def _arrived(self, gradient: Tensor) -> None:
        ours = self.from_calls
        if ours is None or self._pass != torch._C._current_graph_task_id():
            return
        if gradient.data_ptr() != ours.data_ptr() and _is_more(
            gradient, ours.t() if self.layer.layout == CONV1D else ours, self.parameter()
        ):
            self.read_elsewhere.append(self.name)
        self.end()

    def end(self) -> None:
        self._remover.remove()
        self.from_calls = None
        if isinstance(self.layer, NMWeight):  # densify_ may have made it dense
            self.layer.watch = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@torch.no_grad()
def _is_more(gradient: Tensor, ours: Tensor, weight: Tensor | None) -> bool:
    """Whether ``gradient`` is more than ``ours`` and what penalties on ``weight`` give."""
    rest = (gradient.double() - ours.double()).flatten()
    if weight is None or not rest.norm() > SMALL * ours.double().norm():
        return False
    w = weight.double().flatten()
    penalties = torch.stack([w, w.sign()])
    seen = penalties @ rest
    explained = seen @ torch.linalg.pinv(penalties @ penalties.t()) @ seen
    return bool(explained < (1 - SMALL) * rest.square().sum())


def _stamps(layers: Mapping[str, NMWeight]) -> dict[str, tuple[int, int]]:
    """Version and address of weights: they change with every write that torch counts, not with those of fused optimizers and through
    ``.data``. Of sharded weights, and of inference tensors, torch counts none."""
    stamps = {}
    for name, layer in layers.items():  # a loop, since a comprehension is a call
        w = layer.weight if layer.gather is None else None
        if type(w) is nn.Parameter and not w.is_inference():
            stamps[name] = w._version, w.data_ptr()
    return stamps


def _hash(weight: Tensor) -> int | None:
    """64 bits of what ``weight`` holds, on any device; None where it holds nothing yet."""
    return None if weight.is_meta or not weight.numel() else int(torch.hash_tensor(weight).item())
