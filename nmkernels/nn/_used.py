"""The life of the weight used: at most one transformed copy of a layer's weight, rebuilt once per optimizer step.

The copy is dropped when the optimizer has stepped (its post-step hook), when a state dict is loaded, when the module is
moved or cast, and when the weight's version or storage changed. The version alone is not enough: fused optimizers and
writes through ``.data`` do not bump it, so nothing is kept where no attached optimizer tells of its steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..autograd import GemmPlan, HardMask, WeightTransform

State = tuple[int, int, torch.device, torch.dtype]
"""Version, address and device of the weight; dtype of the copy."""


class UsedWeight:
    """Holds one layer's transformed weight, packed too where its products are, and says when it may be used again."""

    def __init__(self) -> None:
        self.attached = False  # an optimizer's hook tells us of every step
        self._tensor: Tensor | None = None
        self._state: State | None = None
        self._owner: weakref.ref[nn.Parameter] | None = None
        self._transform: WeightTransform | None = None
        self._packed: tuple[Tensor, Tensor] | None = None

    def get(self, weight: Tensor, transform: WeightTransform, dtype: torch.dtype, extras: Sequence[Tensor] = ()) -> Tensor:
        """W̃ of ``weight`` ``(out, in)`` in ``dtype``, from the kept copy where that is still right.

        ``extras`` are what the transform reads beside the weight; whoever changes them calls ``drop``.
        """
        if torch.compiler.is_compiling():
            # a graph can neither see a version counter nor a hook: it computes W̃ itself, every time
            return transform(weight.detach(), *extras).to(dtype)
        owner = _owner(weight) if self.attached else None
        if owner is None:
            self.release()
            return self._build(weight, transform, dtype, extras)
        state, same = _state(weight, dtype), self._transform is transform
        if self._tensor is None or not same or not self._is(owner, state):
            self._packed = None
            # another transform of the same weight (an evaluation) must not overwrite what a backward still needs
            self._tensor = self._build(weight, transform, dtype, extras, self._tensor if same else None)
            self._state, self._owner, self._transform = state, weakref.ref(owner), transform
        return self._tensor

    def packed(self, used: Tensor, plan: GemmPlan) -> tuple[Tensor, Tensor]:
        """Values and indices of the compressed form of ``used``, which ``get`` has just returned; kept as long as it is."""
        if torch.compiler.is_compiling():
            return torch.ops.nmkernels.nm_compress(used, plan.n, plan.m)
        if used is self._tensor and self._packed is not None:
            return self._packed
        with torch.inference_mode(False), torch.no_grad():
            packed = torch.ops.nmkernels.nm_compress(used, plan.n, plan.m)
        if used is self._tensor:
            self._packed = packed
        return packed

    def _is(self, owner: nn.Parameter, state: State) -> bool:
        return state == self._state and self._owner is not None and self._owner() is owner

    @staticmethod
    def _build(
        weight: Tensor, transform: WeightTransform, dtype: torch.dtype, extras: Sequence[Tensor], old: Tensor | None = None
    ) -> Tensor:
        """W̃ as a new tensor, or in the memory of ``old`` where it fits."""
        # an inference tensor could never be saved for a later backward
        with torch.inference_mode(False), torch.no_grad():
            w = weight.detach()
            if old is not None and old.dtype == dtype == w.dtype and old.shape == w.shape and old.device == w.device:
                return transform(w, *extras, out=old)
            return transform(w, *extras).to(dtype)

    def sink(self, weight: Tensor) -> Tensor | None:
        """The kept copy, for an optimizer that writes the next M(W) ⊙ W into it in the same pass as its update.

        None unless it is right for the present ``weight``: a step that is skipped leaves it as it is, and it must then still be right.
        """
        owner = _owner(weight)
        if owner is None or self._tensor is None or not isinstance(self._transform, HardMask):
            return None
        return self._tensor if self._is(owner, _state(weight, self._tensor.dtype)) else None

    def filled(self, weight: Tensor) -> None:
        """The optimizer has just written W̃ of the present ``weight`` into ``sink``."""
        self._packed = None
        if self._tensor is not None:
            self._state = _state(weight, self._tensor.dtype)

    def drop(self) -> None:
        """The kept copy is out of date; its memory is kept for the next one."""
        self._state = None

    def release(self) -> None:
        """Forget the copy and its memory."""
        self._tensor = self._state = self._owner = self._transform = self._packed = None

    def __reduce__(self) -> tuple[type[UsedWeight], tuple[()]]:
        # a copied or pickled layer belongs to no optimizer, and its copy of W̃ can be made again
        return UsedWeight, ()


def _owner(weight: Tensor) -> nn.Parameter | None:
    """The Parameter that ``weight`` is or is a view of; None for what ``functional_call`` or a replica puts in its place."""
    base = weight if isinstance(weight, nn.Parameter) else weight._base
    # inference tensors have no version counter
    return base if isinstance(base, nn.Parameter) and not base.is_inference() else None


def _state(weight: Tensor, dtype: torch.dtype) -> State:
    return weight._version, weight.data_ptr(), weight.device, dtype
