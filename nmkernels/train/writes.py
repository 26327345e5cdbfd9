"""Notices writes to weights other than by the attached optimizers: a checkpoint, another optimizer, an average of weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..nn.weight import NMWeight

FORGOTTEN = 3
"""After so many steps of an optimizer that is not attached, without one of an attached optimizer, a warning follows. Wrappers such as
Lookahead make one around each of their own."""


class Writes:
    """What has happened to the weights of ``layers`` since the last step of an attached optimizer.

    ``foreign`` is the class of the last optimizer that stepped them without being attached, ``steps`` how often that happened.
    ``hashes`` are of the weights that the recipe began with, until its first step.
    """

    def __init__(self, layers: dict[str, NMWeight]) -> None:
        self.layers = layers
        self.foreign, self.steps = "", 0
        self.hashes: dict[str, int | None] = {}
        self._stamps: dict[str, tuple[int, int]] = {}
        self._reported: set[str] = set()

    # ---- before the first step

    def start(self) -> None:
        """Something was taken from the present weights: until the first step ``replaced`` finds the layers with other weights."""
        self.hashes = {name: _hash(layer.master.detach()) for name, layer in self.layers.items()}

    def replaced(self) -> list[str]:
        """The layers whose weights are others than at ``start``."""
        return [name for name, before in self.hashes.items() if _hash(self.layers[name].master.detach()) != before]

    def forget(self) -> None:
        """Stop watching: a step is about to be made, or a checkpoint was loaded."""
        self.hashes, self._stamps = {}, {}

    # ---- between two steps

    def stepped(self, names: Iterable[str]) -> None:
        """An attached optimizer has stepped the weights of the layers ``names``."""
        self.foreign, self.steps = "", 0
        self._stamps |= self._stamps_of(names)

    def stepped_by(self, optimizer: torch.optim.Optimizer, recipe: str) -> None:
        """``optimizer``, which is not attached, has stepped; warn where it seems to have been forgotten."""
        params = {id(p) for group in optimizer.param_groups for p in group["params"]}
        names = [name for name, layer in self.layers.items() if id(layer.parameter) in params]
        if not names:
            return
        self.foreign, self.steps = type(optimizer).__name__, self.steps + 1
        if self.steps == FORGOTTEN and self.foreign not in self._reported:
            self._reported.add(self.foreign)
            warnings.warn(
                f"{self.foreign}.step: this optimizer trains {listed(names)}, and the recipe {recipe} is not attached to it: since the "
                f"last step of an attached optimizer it has made {self.steps} without schedule, decay or held masks. Continue with it by "
                "handle.attach(optimizer).",
                stacklevel=4,
            )

    def since_step(self, names: Iterable[str]) -> list[str]:
        """Which of ``names`` were written since the last step of an attached optimizer, as far as that is known; see ``_stamps_of``."""
        now = self._stamps_of(names)
        return [name for name in now if name in self._stamps and (self.steps or self._stamps[name] != now[name])]

    def _stamps_of(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Version and address of weights: they change with every write that torch counts, not with those of fused optimizers and through
        ``.data``. Of sharded weights, and of inference tensors, torch counts none."""
        stamps = {}
        for name in names:  # a loop, since a comprehension is a call
            w = self.layers[name].parameter
            if type(w) is nn.Parameter and not w.is_inference():
                stamps[name] = w._version, w.data_ptr()
        return stamps

    def report_lost(self, verb: str, lost: dict[str, int]) -> None:
        """Warn of layers whose weights are not zero outside their held masks, ``lost`` of each; of every layer once."""
        new = {name: count for name, count in lost.items() if name not in self._reported}
        if not new:
            return
        self._reported.update(new)
        cause = (
            f"{self.foreign}, which is not attached, has stepped them {self.steps} times; continue with it by handle.attach(optimizer)"
            if self.steps
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


def listed(names: Iterable[str]) -> str:
    """Layers as a message names them: the first three, and how many more."""
    names = list(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"layer{'s' * (len(names) > 1)} {', '.join(map(repr, names[:3]))}{more}" if names != [""] else "the model"


def _hash(weight: Tensor) -> int | None:
    """64 bits of what ``weight`` holds, on any device; None where it holds nothing yet."""
    return None if weight.is_meta or not weight.numel() else int(torch.hash_tensor(weight).item())
