"""Finds weights that something outside their layer reads too, such as a decoder that multiplies the transpose."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ..layouts import CONV1D
from ..nn.experts import StackedWeight
from ..nn.weight import NMWeight
from ..shards import is_sharded
from .state import own_rank

SMALL = 0.01
"""The share of a gradient, or of what a penalty explains of one, that may be rounding."""


class Readers:
    """Finds the layers of a run whose weights are read elsewhere too, each in its first backward pass, and warns of them once.

    The gradient of the Parameter in one backward pass is compared with the gradients from the layer's own calls: it is the same tensor,
    or their sum. Any rest is from elsewhere, unless it is a combination of w and sign(w), as a penalty on the weight gives.
    """

    def __init__(self, layers: dict[str, NMWeight]) -> None:
        self.found: list[str] = []
        self._warned = 0
        self._watches = [
            Watch(self, name, layer)
            for name, layer in layers.items()
            if not isinstance(layer, StackedWeight) and _can_tell(layer.parameter)
        ]

    def warn(self) -> None:
        """Warn of the layers that were found since."""
        names = self.found[self._warned :]
        self._warned = len(self.found)
        if not names or own_rank() != 0:
            return
        some = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        warnings.warn(
            f"the weight of layer {some} gets a gradient from outside the layer too: something else reads it, such as a decoder that "
            "multiplies its transpose, or a penalty in the loss. That sees the dense weight while the layer multiplies the sparse one, and "
            "after finish() the pruned weight. For a penalty that may be right; a tied layer is left out with filter_fn.",
            stacklevel=3,
        )

    def end(self) -> None:
        for watch in self._watches:
            watch.end()


def _can_tell(parameter: Tensor) -> bool:
    # hooks that others have put there may change the gradient first
    return parameter.requires_grad and not parameter._backward_hooks and not is_sharded(parameter)


class Watch:
    """One layer's part of ``Readers``; a copy or pickle of the layer has none."""

    def __init__(self, readers: Readers, name: str, layer: NMWeight) -> None:
        self.readers, self.name, self.layer = readers, name, layer
        self.parameter = weakref.ref(layer.parameter)  # fully_shard replaces it, and then frees it
        self.own: Tensor | None = None
        self._pass = -1
        self._remover = layer.parameter.register_hook(self._arrived)
        layer.watch = self

    def see(self, result: Tensor, weight: Tensor, index: int) -> None:
        """``result`` is what the layer's autograd Function made of ``weight``, its input of that index."""
        node: Any = result.grad_fn
        parameter = self.parameter()
        own = parameter is not None and (weight is parameter or weight._base is parameter)
        if own and type(result) is Tensor and isinstance(node, BackwardCFunction):
            node.register_hook(lambda inputs, outputs: self._gave(inputs[index]))

    def _gave(self, gradient: Tensor | None) -> None:
        if gradient is None or getattr(self.layer, "watch", None) is None:
            return
        now = torch._C._current_graph_task_id()
        # held, so that autograd adds nothing to it in place
        self.own = gradient if self.own is None or self._pass != now else self.own + gradient
        self._pass = now

    def _arrived(self, gradient: Tensor) -> None:
        own = self.own
        if own is None or self._pass != torch._C._current_graph_task_id():
            return
        if gradient.data_ptr() != own.data_ptr() and _is_more(gradient, own.t() if self.layer.layout == CONV1D else own, self.parameter()):
            self.readers.found.append(self.name)
        self.end()

    def end(self) -> None:
        self._remover.remove()
        self.own = None
        if isinstance(self.layer, NMWeight):  # densify_ may have been here
            self.layer.watch = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@torch.no_grad()
def _is_more(gradient: Tensor, own: Tensor, weight: Tensor | None) -> bool:
    """Whether ``gradient`` is more than ``own`` and what penalties on ``weight`` give."""
    rest = (gradient.double() - own.double()).flatten()
    if weight is None or not rest.norm() > SMALL * own.double().norm():
        return False
    w = weight.double().flatten()
    penalties = torch.stack([w, w.sign()])
    seen = penalties @ rest
    explained = seen @ torch.linalg.pinv(penalties @ penalties.t()) @ seen
    return bool(explained < (1 - SMALL) * rest.square().sum())
